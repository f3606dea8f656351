"""Which `Routing` a region computes, found by trying those that its operations allow on numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.specs.routing import Routing
from paged_attn.passes.fx.graph_tools import name_of, value_of
from paged_attn.passes.fx.row_layout import MISFITS
from paged_attn.passes.fx.slicing import evaluate_all
from paged_attn.passes.optimize.routing.region import Region

ROWS = (23, 8)  # of a probe
SPREADS = (1.0, 8.0, 0.02)  # of its logits; the last leaves ties in 16 bits
ROUNDINGS = 4  # that a weight may be off by, of the type that it is in


def proved_routing(region: Region, known: Iterable[Routing]) -> Routing | None:
    """The spec that gives the region's ids and weights for every probe; `known`: those of other layers, tried first."""
    probes = [_probe(region, rows, spread) for rows in ROWS for spread in SPREADS]
    try:
        expected = [_evaluated(region, *probe) for probe in probes]
    except MISFITS:
        return None
    for routing in dict.fromkeys((*known, *_candidates(region))):
        if all(_agrees(routing, probe, wanted) for probe, wanted in zip(probes, expected, strict=True)):
            return routing
    return None


def _probe(region: Region, rows: int, spread: float) -> tuple[Tensor, Tensor | None]:
    """Logits of random rows, one row that no expert is for, so that what is added to a sum shows, and one of equal ones; a random bias."""
    fake = value_of(region.logits)
    numbers = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, fake.shape[1], generator=numbers) * spread
    logits[-2:] = torch.tensor([[-50.0], [0.0]])
    if region.bias is None:
        return logits.to(fake.device, fake.dtype), None
    bias = value_of(region.bias)
    return logits.to(fake.device, fake.dtype), torch.rand(bias.shape, generator=numbers).to(bias.device, bias.dtype)


def _evaluated(region: Region, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    given: dict[fx.Node, Any] = {region.logits: logits.clone()}
    if region.bias is not None and bias is not None:
        given[region.bias] = bias.clone()
    given |= {node: logits.new_empty(0, dtype=value_of(node).dtype) for node in region.of_type}
    values = evaluate_all(region.nodes, given)
    return values[region.weights], values[region.ids]


def _agrees(routing: Routing, probe: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor]) -> bool:
    weights, ids = expected
    if weights.shape != (len(probe[0]), routing.top_k) or ids.shape != weights.shape:
        return False
    try:
        given, chosen = routing(*probe)
    except MISFITS:
        return False
    order, wanted = chosen.argsort(1), ids.argsort(1)  # in which order a token's experts stand is not asked
    if not torch.equal(chosen.gather(1, order), ids.gather(1, wanted)):
        return False
    limit = ROUNDINGS * torch.finfo(weights.dtype).eps
    return torch.allclose(given.gather(1, order), weights.gather(1, wanted).float(), rtol=limit, atol=limit * 1e-3)


def _candidates(region: Region) -> Iterator[Routing]:
    """What the names and literals of the region's operations leave open."""
    names = [name_of(node) for node in region.nodes]
    top_k = int(value_of(region.ids).shape[-1])
    experts = int(value_of(region.logits).shape[1])
    literals = set(_literals(region.nodes))
    scores = [("none", "none")]
    for score in ("softmax", "sigmoid"):
        if any(score in name for name in names):
            scores += [(score, "none"), ("none", score)]
    scales = [1.0, *sorted(number for number in literals if number > 0 and number != 1.0)]
    epsilons = [0.0, *sorted(number for number in literals if 0 < number <= 1e-3)]
    renormalised = (
        [(False, 0.0), *((True, eps) for eps in epsilons)] if any(name in ("sum", "div", "truediv") for name in names) else [(False, 0.0)]
    )
    groups: list[tuple[int, int, int, float]] = [(1, 1, 1, float("-inf"))]
    if names.count("topk") > 1:
        sizes = sorted(int(number) for number in literals if number == int(number) and 1 <= number <= experts)
        for count, taken, best in itertools.product(sizes, sizes, (1, 2)):
            if 1 < count < experts and experts % count == 0 and taken < count + 1 and best <= experts // count:
                groups += [(count, taken, best, hidden) for hidden in (float("-inf"), 0.0)]
    for (count, taken, best, hidden), (score, after), (divided, eps), scale in itertools.product(groups, scores, renormalised, scales):
        rounded = score != "none" and _in_16_bits(region, score)
        yield Routing(top_k, score, after, count, taken, best, hidden, divided, eps, scale, rounded)


def _in_16_bits(region: Region, score: str) -> bool:
    first = next(node for node in region.nodes if score in name_of(node))
    return bool(value_of(first).dtype.itemsize == 2)


def _literals(nodes: list[fx.Node]) -> Iterator[float]:
    for node in nodes:
        found: list[Any] = []
        fx.node.map_aggregate((node.args, node.kwargs), found.append)
        for each in found:
            if isinstance(each, int | float) and not isinstance(each, bool) and abs(each) < 1e6:
                yield float(each)
