"""What dense experts compute, found by trying it on numbers: random tokens, logits and weights, none of the model's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.ops.experts import experts_one_by_one
from paged_attn.attn_ops.specs.experts import ACTIVATIONS, Gating
from paged_attn.passes.fx.graph_tools import name_of, value_of
from paged_attn.passes.fx.row_layout import MISFITS
from paged_attn.passes.fx.slicing import evaluate_all
from paged_attn.passes.fx.tolerance import operation_limit
from paged_attn.passes.optimize.dense_experts.region import DenseExperts

ROWS = (23, 8)
SPREADS = (1.0, 8.0, 0.02)  # of logits; the last leaves ties in 16 bits
INNER = 8  # between an expert's products, in place of the model's: what a region does there, it does to each number


def proved_gating(region: DenseExperts) -> Gating | None:
    """What stands between the products, if the region sums up what a token's chosen experts make of their score times the token."""
    found = _evaluated(region, torch.float32) or _evaluated(region, None)
    if found is None:
        return None
    probes, values = found
    if not all(_chosen_alone(value[region.scores], value[region.ids]) for value in values):
        return None
    for gating in _candidates(region):
        if all(probe.agrees(gating, value) for probe, value in zip(probes, values, strict=True)):
            return gating
    return None


def _evaluated(region: DenseExperts, dtype: torch.dtype | None) -> tuple[list[_Probe], list[dict[fx.Node, Tensor]]] | None:
    """Probes of a type, None for the model's own, and all values of the region; None where its operations do not take the type.

    In 16 bits activations that differ a little, as GELU and its approximation, can not be told apart.
    """
    weights = _weights(region, dtype)
    of_logits = dtype or value_of(region.logits).dtype
    probes = [_Probe(region, *weights, of_logits, rows, spread) for rows in ROWS for spread in SPREADS]
    try:
        return probes, [evaluate_all(region.nodes, probe.given) for probe in probes]
    except MISFITS:
        return None


def _weights(region: DenseExperts, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Random ones in place of the model's, of as many experts, for all probes."""
    w1, w2 = value_of(region.w1), value_of(region.w2)
    experts, hidden, wide = w1.shape
    numbers = torch.Generator().manual_seed(0)
    first = torch.randn(experts, hidden, wide // w2.shape[1] * INNER, generator=numbers) * hidden**-0.5
    second = torch.randn(experts, INNER, hidden, generator=numbers)
    return first.to(w1.device, dtype or w1.dtype), second.to(w2.device, dtype or w2.dtype)


def _chosen_alone(scores: Tensor, ids: Tensor) -> bool:
    """Whether the scores of all experts but the chosen ones are zero."""
    return not scores.scatter(1, ids, 0.0).any() and bool(scores.any())


class _Probe:
    """Random numbers in place of what a region reads: one expert is favoured, by less or more; the last row is zeros."""

    def __init__(self, region: DenseExperts, w1: Tensor, w2: Tensor, of_logits: torch.dtype, rows: int, spread: float) -> None:
        self._region, self.w1, self.w2 = region, w1, w2
        numbers = torch.Generator().manual_seed(rows)
        experts, hidden, _ = w1.shape
        self.x = torch.randn(rows, hidden, generator=numbers).to(w1.device, w1.dtype)
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
    """What the names of the region's operations leave open."""
    names = " ".join(name_of(node) for node in region.nodes)
    for name in ACTIVATIONS:
        if name == "identity" or name.split("_")[0].rstrip("2") in names:
            yield from (Gating(name, gated, interleaved) for gated, interleaved in ((True, False), (True, True), (False, False)))
