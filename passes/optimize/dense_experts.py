"""Replaces experts that all compute every token by `paged_attn::experts`, which reads only the chosen ones; tried on numbers first.

Before: each token times each expert's score (zero for all but k experts), through bmm, a gate and bmm, summed over all experts
After:  paged_attn.experts(the token times its score, ids of the chosen, ones, ...), and for k above 1 a sum over the k
Left alone: anything for which the numbers differ. How the k are chosen stays as it is.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.ops.experts import EXPERTS, experts_one_by_one
from paged_attn.attn_ops.specs.experts import ACTIVATIONS, ExpertsSpec, Gating
from paged_attn.passes.fx.call_form import ReadValues
from paged_attn.passes.fx.graph_tools import argument_of, call_with_value, name_of, reached, shape_of, sizes_of, value_of
from paged_attn.passes.fx.memory import behind_views, remove_dead_code, written_values
from paged_attn.passes.fx.row_layout import MISFITS
from paged_attn.passes.fx.slicing import ancestors, evaluate_all, operation_limit
from paged_attn.passes.optimize.routing import MOST_NODES, PRODUCTS, ROWS, SPREADS

logger = logging.getLogger("paged_attn")
_BATCHED = ("bmm", "matmul")
LOUD = 30.0  # size of the rows in the shorter probes: limits on a gate show there
INNER = 8  # intermediate width of a probed expert, in place of the model's: the operations there are elementwise
ChooseExperts = Callable[[ExpertsSpec, Tensor], str]  # the name of a backend for a layer with weights like these


def replace_dense_experts(graph: fx.Graph, values: ReadValues, choose: ChooseExperts) -> int:
    """Rewrites in place; returns how many layers became one op. Does not read the contents of `values`."""
    count = 0
    for region in regions_of(graph, values.keys()):
        gating = proved_gating(region)
        if gating is not None:
            _replace(graph, region, gating, choose)
            count += 1
    if count:
        logger.info("%d layers of experts that computed every token now compute only the tokens that chose them", count)
        remove_dead_code(graph)
    return count


def _replace(graph: fx.Graph, region: DenseExperts, gating: Gating, choose: ChooseExperts) -> None:
    experts, hidden, _ = shape_of(region.w1)
    spec = ExpertsSpec(experts, hidden, shape_of(region.w2)[1], gating)
    top_k = shape_of(region.ids)[1]
    with graph.inserting_before(region.total):
        scores = call_with_value(graph, "gather", region.scores, 1, region.ids)
        rows, ids = region.x, region.ids
        if top_k > 1:
            rows = call_with_value(graph, "unsqueeze", rows, 1)
            scores = call_with_value(graph, "unsqueeze", scores, 2)
            ids = call_with_value(graph, "reshape", ids, -1, 1)
        rows = call_with_value(graph, operator.mul, rows, scores)
        if top_k > 1:
            rows = call_with_value(graph, "reshape", rows, -1, hidden)
        ones = call_with_value(graph, torch.ones_like, ids, dtype=value_of(rows).dtype)
        w1, w2 = (call_with_value(graph, "transpose", weight, 1, 2) for weight in (region.w1, region.w2))
        backend = choose(spec, value_of(region.w1))
        result = call_with_value(graph, EXPERTS, rows, ids, ones, w1, w2, None, None, *gating.arguments, backend)
        if top_k > 1:
            result = call_with_value(graph, "reshape", result, -1, top_k, hidden)
            result = call_with_value(graph, "sum", result, 1)
    region.total.replace_all_uses_with(result)


class DenseExperts(NamedTuple):
    """Nodes in graph order, from x [T, H] and logits [T, E] to total [T, H].

    Attributes:
        scores: [T, E], made of the logits only; x is multiplied by them.
        ids: [T, k] of each token's chosen experts.
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
    """All candidate regions; `weights`: the graph's inputs that are tensors of the model."""
    sums = [node for node in graph.nodes if name_of(node) == "sum" and argument_of(node, 1, "dim") in (0, (0,), [0])]
    return [region for node in sums if len(sizes_of(node)) == 2 and (region := _region(node, weights)) is not None]


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
    """The weight [E, ., .] of a batched product; None if the node is not one."""
    if not isinstance(node, fx.Node) or name_of(node) not in _BATCHED or len(node.args) < 2:
        return None
    weight = node.args[1]
    return weight if isinstance(weight, fx.Node) and weight in weights and len(sizes_of(weight)) == 3 else None


def _logits(first: fx.Node, experts: Any) -> fx.Node | None:
    """The only product [T, E] that `first` is made from without another product in between, or None."""

    def before(node: fx.Node) -> list[fx.Node]:
        return [] if node.target in PRODUCTS else [*node.all_input_nodes, *(user for user in node.users if node in written_values(user))]

    products = [n for n in reached((n for n in first.args[:1] if isinstance(n, fx.Node)), before) if n.target in PRODUCTS]
    found = [node for node in products if len(sizes_of(node)) == 2 and sizes_of(node)[1] == experts]
    return found[0] if len(found) == 1 and isinstance(found[0].args[0], fx.Node) else None


def _made_of(source: fx.Node, nodes: list[fx.Node], besides: fx.Node | None = None) -> set[fx.Node]:
    """`source` and the nodes that depend on it other than through `besides`."""
    found = {source}
    for node in nodes:
        if node is not besides and any(each in found for each in node.all_input_nodes):
            found |= {node} | written_values(node) & set(nodes)
    return found


def proved_gating(region: DenseExperts) -> Gating | None:
    """The gating between the products, if the region sums each chosen expert's result for the token times its score; else None."""
    found = _evaluated(region, torch.float32) or _evaluated(region, None)
    if found is None:
        return None
    probes, values = found
    pairs = [(value[region.scores], value[region.ids]) for value in values]
    if any(scores.scatter(1, ids, 0.0).any() or not scores.any() for scores, ids in pairs):  # experts that were not chosen count
        return None
    for gating in _candidates(region):
        if all(probe.agrees(gating, value) for probe, value in zip(probes, values, strict=True)):
            return gating
    return None


def _evaluated(region: DenseExperts, dtype: torch.dtype | None) -> tuple[list[_Probe], list[dict[fx.Node, Tensor]]] | None:
    """Probes in a dtype (None: the model's own) and all values of the region; None if its operations do not support the dtype.

    In 16 bits, activations that differ only slightly (GELU and its approximation) cannot be told apart.
    """
    weights = _weights(region, dtype)
    of_logits = dtype or value_of(region.logits).dtype
    probes = [_Probe(region, *weights, of_logits, rows, spread) for rows in ROWS for spread in SPREADS]
    try:
        return probes, [evaluate_all(region.nodes, probe.given) for probe in probes]
    except MISFITS:
        return None


def _weights(region: DenseExperts, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Random weights for as many experts as the model has, used by all probes."""
    w1, w2 = value_of(region.w1), value_of(region.w2)
    experts, hidden, wide = w1.shape
    numbers = torch.Generator().manual_seed(0)
    first = torch.randn(experts, hidden, wide // w2.shape[1] * INNER, generator=numbers) * hidden**-0.5
    second = torch.randn(experts, INNER, hidden, generator=numbers)
    return first.to(w1.device, dtype or w1.dtype), second.to(w2.device, dtype or w2.dtype)


class _Probe:
    """Random inputs of a region. One expert is favoured, more or less; the last row is zero."""

    def __init__(self, region: DenseExperts, w1: Tensor, w2: Tensor, of_logits: torch.dtype, rows: int, spread: float) -> None:
        self._region, self.w1, self.w2 = region, w1, w2
        numbers = torch.Generator().manual_seed(rows)
        experts, hidden, _ = w1.shape
        size = 1.0 if rows == max(ROWS) else LOUD
        self.x = (torch.randn(rows, hidden, generator=numbers) * size).to(w1.device, w1.dtype)
        self.x[-1] = 0
        logits = torch.randn(rows, experts, generator=numbers) * spread
        logits[:, rows % experts] += spread
        self.given: dict[fx.Node, Tensor] = {region.x: self.x, region.w1: w1, region.w2: w2, region.logits: logits.to(w1.device, of_logits)}

    def agrees(self, gating: Gating, values: dict[fx.Node, Tensor]) -> bool:
        expected, scores, ids = (values[node] for node in (self._region.total, self._region.scores, self._region.ids))
        if self.w1.shape[2] != (1 + gating.gated) * INNER or expected.shape != self.x.shape:
            return False
        rows = (self.x[:, None] * scores.gather(1, ids)[:, :, None]).flatten(0, 1)
        weights = (self.w1.transpose(1, 2), self.w2.transpose(1, 2), None, None)
        given = experts_one_by_one(rows, ids.reshape(-1, 1), torch.ones_like(rows[:, :1]), *weights, gating)
        error = (given.view(*ids.shape, -1).sum(1) - expected).abs().max().item()
        return bool(expected.any()) and error <= operation_limit(expected, expected.dtype)


def _candidates(region: DenseExperts) -> Iterator[Gating]:
    """The gatings that are possible given the names of the region's operations."""
    names = " ".join(name_of(node) for node in region.nodes)
    for name in ACTIVATIONS:
        if name == "identity" or name.split("_")[0].rstrip("2") in names:
            yield from (Gating(name, gated, interleaved) for gated, interleaved in ((True, False), (True, True), (False, False)))
