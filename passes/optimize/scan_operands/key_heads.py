"""A delta rule reads queries and keys before they were repeated for the value heads that they serve.

Before: query, key [1, T, key heads, K] -> repeat_interleave, expand, reshape ... -> [T, H, K] -> paged_attn.gated_delta_rule_with_output
After:  query, key [T, key heads, K] -> the same op, which reads each for all of its value heads
Proved, not matched: what repeats is evaluated on a tensor of distinct numbers.
Left alone: what computes on the way or is written to, a query and a key of different numbers of heads, and Kimi's rule (no model repeats
keys for it, and other packages' kernels were not tried with fewer).
"""

from __future__ import annotations

from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from paged_attn.attn_ops.ops.scans.gated_delta import GATED_DELTA_RULE
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import shape_of, value_of
from paged_attn.passes.replace.kv_heads import KVSource, head_rows, rows_in, unrepeated


def read_unrepeated_heads(graph: fx.Graph, form: CallForm) -> int:
    """Rewrite in place; returns how many delta rules have fewer query and key heads now."""
    found = 0
    for node in [node for node in graph.nodes if node.target is GATED_DELTA_RULE]:
        query, key, *others = node.args
        one, other = (_source(each, node, form) for each in (query, key))
        if one is None or other is None or one.num_heads != other.num_heads:
            continue
        with graph.inserting_before(node), enable_python_dispatcher():
            node.args = (*(_rows(source, node) for source in (one, other)), *others)
        found += 1
    return found


def _source(repeated: fx.Node, user: fx.Node, form: CallForm) -> KVSource | None:
    """The fewest-headed ancestor that `repeated` [T, H, K] repeats over heads, head by head, without computing anything."""
    received = KVSource(repeated, (), (0, 1, 2), int(shape_of(repeated)[1]))
    return min(unrepeated(received, user, form), key=lambda source: source.num_heads, default=None)


def _rows(source: KVSource, user: fx.Node) -> fx.Node:
    """[T, key heads, K], made for the module of `user`."""
    node = made = head_rows(source)
    while made is not source.base:
        made.meta["nn_module_stack"] = user.meta.get("nn_module_stack")
        made = made.args[0]  # type: ignore[assignment]
    node.meta["example_value"] = rows_in(value_of(source.base), source)
    return node
