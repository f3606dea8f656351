"""Takes keys and values directly that a module writes into a buffer of its own and reads back.

Before: cache[:1, 0:T] = k; keys = cache[:1, :T], as reference code of Llama and DeepSeek has it
After:  keys = k; the buffer is neither written nor read, so that its size is no limit for a step of many requests
Leaves alone: buffers that are read as a whole, before they are written, or at other indices than those that were written last.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import (
    call_with_value,
    is_written,
    name_of,
    shape_of,
    sizes_of,
    storages_of,
    symbol,
    value_of,
    writers_of,
)


def take_written_values(graph: fx.Graph, form: CallForm) -> None:
    """Rewrites every such buffer of the model in place."""
    for buffer, writers in writers_of(graph.nodes).items():
        if buffer.op != "placeholder" or form.roles[buffer] != "owned":
            continue
        uses = _uses(buffer)
        taken = _values_of_reads(uses)
        if taken is None or not set(writers) <= set(uses):  # what was read is a view, and may be written, too
            continue
        for read, value in taken.items():
            with graph.inserting_before(read):
                read.replace_all_uses_with(_as_read(value, read))
        for node in sorted(uses, reverse=True):
            if not node.users:
                graph.erase_node(node)


def _uses(buffer: fx.Node) -> list[fx.Node]:
    """All that reads or writes a buffer, also under another name: `cache.to(x)` of the same dtype and device is the cache itself."""
    found: list[fx.Node] = []
    pending = [buffer]
    while pending:
        node = pending.pop()
        for user in node.users:
            found.append(user)
            if name_of(user) == "to" and sizes_of(user) == sizes_of(buffer) and storages_of([user]) == storages_of([buffer]):
                pending.append(user)
    return sorted(set(found))


def _values_of_reads(uses: list[fx.Node]) -> dict[fx.Node, fx.Node] | None:
    """The value that each read returns; None if a use is neither a read nor a write of the same part of the buffer."""
    taken: dict[fx.Node, fx.Node] = {}
    last: fx.Node | None = None
    for node in uses:
        if name_of(node) == "to":
            continue
        if node.target is operator.setitem and isinstance(node.args[2], fx.Node) and not taken:  # what was read before would change
            last = node
        elif node.target is operator.getitem and last is not None and _fits(node, last):
            assert isinstance(last.args[2], fx.Node)
            taken[node] = last.args[2]
        else:
            return None
    return taken


def _fits(read: fx.Node, write: fx.Node) -> bool:
    buffer, value = read.args[0], write.args[2]
    assert isinstance(value, fx.Node)
    parts = [_part(node.args[1], sizes_of(node.args[0])) for node in (read, write)]
    sizes, given = sizes_of(read), sizes_of(value)
    same = (
        None not in parts and parts[0] == parts[1] and given[-len(sizes) :] == sizes[len(sizes) - len(given) :] and len(given) <= len(sizes)
    )
    alike = value_of(value).device == value_of(buffer).device and all(size == 1 for size in sizes[: len(sizes) - len(given)])
    return same and alike and not is_written({value}, write, read)


def _part(index: Any, sizes: tuple[Any, ...]) -> list[tuple[Any, Any]] | None:
    """(first, behind the last) in each dim; None if an index is not a slice."""
    slices = list(index) if isinstance(index, tuple) else [index]
    if len(slices) > len(sizes) or not all(isinstance(each, slice) and each.step in (None, 1) for each in slices):
        return None
    slices += [slice(None)] * (len(sizes) - len(slices))
    found = []
    for each, size in zip(slices, sizes, strict=True):
        first, last = (symbol(value_of(end)) for end in (0 if each.start is None else each.start, size if each.stop is None else each.stop))
        found.append((first, size if isinstance(last, int) and last > size else last))
    return found if all(not isinstance(end, int) or end >= 0 for part in found for end in part) else None


def _as_read(value: fx.Node, read: fx.Node) -> fx.Node:
    """A written value in the shape and dtype in which the buffer returns it."""
    for _ in range(len(shape_of(read)) - len(shape_of(value))):
        value = call_with_value(read.graph, "unsqueeze", value, 0)
    dtype = value_of(read).dtype
    return value if value_of(value).dtype == dtype else call_with_value(read.graph, "to", value, dtype)
