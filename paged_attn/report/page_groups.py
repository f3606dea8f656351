"""What `explain` says of memory: how it was divided, of layers with page tables of their own, and of keys that do not last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paged_attn.attn_ops.kv.kv_pool import page_elements
from paged_attn.attn_ops.kv.layer_groups import LENGTH, LayerGroup
from paged_attn.report.explanation import ranges

if TYPE_CHECKING:
    from paged_attn.engine.engine import Engine

MIB = 2**20


def memory_lines(engine: Engine) -> list[str]:
    """How pages and recurrent states share the memory, and who has the states now; how long keys last; then `page_lines`."""
    kv, slots = engine.kv, engine.budget.slots
    lines = [f"  memory       {engine.budget.describe(engine.pool.num_pages)}"]
    if slots.total:
        running, kept = kv.states.num_in_use, kv.states.num_snapshots
        free = slots.most_running - running - kept
        lines.append(f"               {running} states of requests, {kept} of kept prefixes, {free} slots free now")
    if borders := engine.limits.length_borders:
        more = " or ".join(f"{border:,}" for border in borders)
        lines.append(f"  longrope     a request of more than {more} tokens has other keys: one that comes to have more is computed anew")
    return [*lines, *page_lines(engine)]


def page_lines(engine: Engine) -> list[str]:
    """A line for each kind of group, with what it takes now, and one that says what a long request takes; none without groups."""
    pool, tokens, size = engine.pool, engine.limits.max_positions or LENGTH, engine.config.page_size
    if not pool.groups:
        return []
    tokens, frame_bytes = min(tokens, LENGTH), pool.page_elements * pool.dtype.itemsize
    kinds: dict[str, list[LayerGroup]] = {}
    for group in pool.groups:
        kinds.setdefault(group.keeps.describe(), []).append(group)
    lines = []
    for keeps, groups in kinds.items():
        pages, nbytes = engine.kv.use_by_retention(frame_bytes)[keeps]
        lines.append(f"  pages        {_tables(groups)} keep {keeps}: {pages:,} pages, {nbytes / MIB:,.1f} MiB now")
    each = sum(group.keeps.pages(tokens, size) for group in pool.groups) * frame_bytes
    before = -(-tokens // size) * page_elements(pool.layers, size) * pool.dtype.itemsize
    return [*lines, f"               a request of {tokens:,} tokens takes {each / MIB:,.1f} MiB, and {before / MIB:,.1f} with one table"]


def _tables(groups: Sequence[LayerGroup]) -> str:
    """`layers 0, 1 | 3, 4`: with a bar between tables."""
    return "layers " + " | ".join(ranges(group.layers) for group in groups)
