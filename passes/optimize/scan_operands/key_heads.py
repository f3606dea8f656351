"""A delta rule reads queries and keys before they were repeated for the value heads that they serve.

Before: query, key [1, T, key heads, K] -> repeat_interleave, expand, reshape ... -> [T, H, K] -> paged_attn.gated_delta_rule_with_output
After:  query, key [T, key heads, K] -> the same op, which reads each for all of its value heads
Proved, not matched: what repeats is evaluated on a tensor of distinct numbers.
Left alone: what computes on the way or is written to, a query and a key of different numbers of heads, and Kimi's rule (no model repeats
keys for it, and other packages' kernels were not tried with fewer).
"""

from __future__ import annotations

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from paged_attn.attn_ops.ops.scans.gated_delta import GATED_DELTA_RULE
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import shape_of, value_of
from paged_attn.passes.replace.kv_heads import KVSource, head_layout, head_rows, is_written, on_distinct_numbers, rows_in, shape_ancestors


def read_unrepeated_heads(graph: fx.Graph, form: CallForm) -> int:
    """Rewrite in place; returns how many delta rules have fewer query and key heads now."""
    found = 0
    for node in [node for node in graph.nodes if node.target is GATED_DELTA_RULE]:
        query, key, *others = node.args
        sources = [_source(each, node, form) for each in (query, key)]
        one, other = sources
        if one is None or other is None or one.num_heads != other.num_heads:
            continue
        with graph.inserting_before(node), enable_python_dispatcher():
            node.args = (*(_rows(source, node) for source in (one, other)), *others)
        found += 1
    return found


def _source(repeated: fx.Node, user: fx.Node, form: CallForm) -> KVSource | None:
    """The fewest-headed ancestor that `repeated` [T, H, K] repeats over heads, head by head, without computing anything."""
    best = None
    for base, chain in shape_ancestors(repeated):
        source = _proved(base, chain, repeated, form)
        if source is not None and not is_written({base, *chain}, chain[0], user) and (best is None or source.num_heads < best.num_heads):
            best = source
    return best


def _proved(base: fx.Node, chain: list[fx.Node], repeated: fx.Node, form: CallForm) -> KVSource | None:
    heads, dim = (int(size) for size in shape_of(repeated)[1:])
    layout = head_layout(base, dim, form)
    if layout is None or layout[2] >= heads or heads % layout[2]:
        return None
    source = KVSource(base, *layout)
    numbers, result = on_distinct_numbers(base, chain, form)
    expected = rows_in(numbers, source).repeat_interleave(heads // source.num_heads, 1)
    return source if torch.equal(result, expected) else None


def _rows(source: KVSource, user: fx.Node) -> fx.Node:
    """[T, key heads, K], made for the module of `user`."""
    node = made = head_rows(source)
    while made is not source.base:
        made.meta["nn_module_stack"] = user.meta.get("nn_module_stack")
        made = made.args[0]  # type: ignore[assignment]
    node.meta["example_value"] = rows_in(value_of(source.base), source)
    return node
