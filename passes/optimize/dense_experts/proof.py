"""What dense experts compute, found by trying it on numbers: random tokens, logits and weights, none of the model's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.ops.experts import experts_one_by_one
from paged_attn.attn_ops.specs.experts import ACTIVATIONS, Gating
from paged_attn.passes.fx.graph_tools import value_of
from paged_attn.passes.fx.row_layout import MISFITS
from paged_attn.passes.fx.slicing import evaluate_all
from paged_attn.passes.fx.token_data import name_of
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
    probes = [_Probe(region, rows, spread, dtype) for rows in ROWS for spread in SPREADS]
    try:
        return probes, [evaluate_all(region.nodes, probe.given) for probe in probes]
    except MISFITS:
        return None


def _chosen_alone(scores: Tensor, ids: Tensor) -> bool:
    """Whether the scores of all experts but the chosen ones are zero."""
    return not scores.scatter(1, ids, 0.0).any() and bool(scores.any())


class _Probe:
    """Random numbers in place of what a region reads: one expert gets nearly all rows, or all chances are alike; a row of no tokens."""

    def __init__(self, region: DenseExperts, rows: int, spread: float, dtype: torch.dtype | None) -> None:
        self._region = region
        numbers = torch.Generator().manual_seed(rows)
        x, logits, w1, w2 = (value_of(node) for node in (region.x, region.logits, region.w1, region.w2))
        halves = w1.shape[2] // w2.shape[1]
        experts, hidden = w1.shape[0], w1.shape[1]

        def random(like: Tensor, *sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=numbers).to(like.device, dtype or like.dtype)

        favoured = torch.zeros(experts)
        favoured[rows % experts] = spread
        self.w1, self.w2 = random(w1, experts, hidden, halves * INNER) * hidden**-0.5, random(w2, experts, INNER, hidden)
        self.x = random(x, rows, hidden)
        self.x[-1] = 0
        self.given: dict[fx.Node, Tensor] = {
            region.x: self.x, region.w1: self.w1, region.w2: self.w2,
            region.logits: random(logits, rows, experts) * spread + favoured.to(logits.device, dtype or logits.dtype),
        }  # fmt: skip

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
