"""The operations between a token, its router's logits, and the sum over all experts of what each makes of it."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import fx

from paged_attn.attn_ops.ops.linears.linear import LINEAR
from paged_attn.passes.fx.graph_tools import behind_views, name_of, sizes_of, value_of, written_values
from paged_attn.passes.fx.slicing import ancestors

MOST_NODES = 80  # of a region
_LINEARS = (F.linear, LINEAR)
_BATCHED = ("bmm", "matmul")


class DenseExperts(NamedTuple):
    """Nodes in graph order, from x [T, H] and logits [T, E] to total [T, H].

    Attributes:
        scores: [T, E], made of the logits alone; x is multiplied with them.
        ids: [T, k] of the experts that a token chose.
        w1, w2: weights [E, H, n] and [E, m, H].
    """

    nodes: list[fx.Node]
    x: fx.Node
    logits: fx.Node
    scores: fx.Node
    ids: fx.Node
    w1: fx.Node
    w2: fx.Node
    total: fx.Node


def regions_of(graph: fx.Graph, weights: Container[fx.Node]) -> list[DenseExperts]:
    """All that look like it; `weights`: the graph's inputs that are tensors of the model."""
    found = (_region(node, weights) for node in graph.nodes if _sums_over_first(node))
    return [region for region in found if region is not None]


def _sums_over_first(node: fx.Node) -> bool:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return name_of(node) == "sum" and dims in (0, (0,), [0]) and len(sizes_of(node)) == 2


def _region(total: fx.Node, weights: Container[fx.Node]) -> DenseExperts | None:
    second = behind_views(total.args[0])
    w2 = _batched_weight(second, weights)
    if w2 is None:
        return None
    first = next((node for node in reversed(ancestors(second, second)) if node is not second and _batched_weight(node, weights)), None)
    w1 = _batched_weight(first, weights)
    if first is None or w1 is None or sizes_of(w1)[0] != sizes_of(w2)[0]:
        return None
    logits = _logits(first, sizes_of(w1)[0])
    if logits is None:
        return None
    x: Any = logits.args[0]
    nodes = ancestors(total, total, frozenset({x, logits}))
    inputs = {node for node in nodes if node.op == "placeholder"}
    changed = any(written_values(node) & {x, logits, w1, w2} for node in nodes)
    alike = len({value_of(node).dtype for node in (x, w1, w2, total)}) == 1
    if x not in nodes or inputs - {x} != {w1, w2} or changed or not alike or len(nodes) > MOST_NODES:
        return None
    of_logits = _made_of(logits, nodes) - _made_of(x, nodes, besides=logits)
    scores = [node for node in sorted(of_logits) if node is not logits and sizes_of(node) == sizes_of(logits)]
    chosen = [node for node in of_logits if name_of(node) == "topk"]
    ids = [node for topk in chosen for node in topk.users if name_of(node) == "getitem" and node.args[1] == 1]
    if len(ids) != 1 or not scores:
        return None
    return DenseExperts(nodes, x, logits, scores[-1], ids[0], w1, w2, total)


def _batched_weight(node: Any, weights: Container[fx.Node]) -> fx.Node | None:
    """The weight [E, ., .] of a batched product, if it is one."""
    if not isinstance(node, fx.Node) or name_of(node) not in _BATCHED or len(node.args) < 2:
        return None
    weight = node.args[1]
    return weight if isinstance(weight, fx.Node) and weight in weights and len(sizes_of(weight)) == 3 else None


def _logits(first: fx.Node, experts: Any) -> fx.Node | None:
    """The one product [T, E] that `first` is made from, with no other product in between."""
    found, seen, pending = list[fx.Node](), set[fx.Node](), list(first.args[:1])
    while pending:
        node = pending.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if node.target in _LINEARS:
            found += [node] if len(sizes_of(node)) == 2 and sizes_of(node)[1] == experts else []
            continue
        pending += node.all_input_nodes
        pending += [user for user in node.users if node in written_values(user)]
    return found[0] if len(found) == 1 and isinstance(found[0].args[0], fx.Node) else None


def _made_of(source: fx.Node, nodes: list[fx.Node], besides: fx.Node | None = None) -> set[fx.Node]:
    """The nodes that a value goes into, itself among them, but for what it reaches through `besides`."""
    found = {source}
    for node in nodes:
        if node is not besides and any(each in found for each in node.all_input_nodes):
            found |= {node} | written_values(node) & set(nodes)
    return found
