"""Which tokens may be drawn, and drawing one: every row by its own settings, on the device, without waiting for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NEG_INF = float("-inf")


class SortedCandidates(NamedTuple):
    """Each row's tokens from least to most likely; those at and after `first` may be drawn.

    order [N, V] int64 token ids, cumulative [N, V] float64 probabilities (after top-k), first [N, 1] int64.
    """

    order: Tensor
    cumulative: Tensor
    first: Tensor


class Filters(NamedTuple):
    """Of N rows: lowest [N] int64, the rank of the least likely token that top-k keeps; tail [N] float32, 1 - top_p, or -1 for all;
    min_p [N] float32. Whether any row uses the filter at all."""

    lowest: Tensor
    tail: Tensor
    min_p: Tensor
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool


def at_temperature(scores: Tensor, temperature: Tensor) -> Tensor:
    """scores [N, V] float32, temperature [N] -> [N, V], finite where scores are."""
    return (scores / temperature.unsqueeze(-1)).clamp_(max=torch.finfo(torch.float32).max)


def filter_scores(scores: Tensor, filters: Filters) -> SortedCandidates:
    """Top-k, top-p and min-p of scores [N, V] float32 at their temperature.

    Source: the order and boundaries of transformers 5.23 (`generation/logits_process.py`).
    """
    vocab = scores.shape[-1]
    # stable, so that ties fall the same way whatever else is in the batch
    values, order = torch.sort(scores, dim=-1, stable=True)
    first = torch.zeros(len(scores), 1, dtype=torch.int64, device=scores.device)
    if filters.any_top_k:
        dropped = values < values.gather(-1, filters.lowest.unsqueeze(-1))
        values.masked_fill_(dropped, NEG_INF)
        first = dropped.sum(-1, keepdim=True)
    # float64: what torch's float32 cumsum uses inside on the CPU, and on a GPU the sum then hardly depends on the batch
    cumulative = values.softmax(-1).cumsum(-1, dtype=torch.float64)
    if filters.any_top_p:
        count = (cumulative.float() <= filters.tail.unsqueeze(-1)).sum(-1, keepdim=True)
        first = torch.maximum(first, count.clamp_(max=vocab - 1))
    if filters.any_min_p:
        ranks = torch.arange(vocab, device=scores.device)
        dropped = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, ranks < first)
        probs = scores.masked_fill(dropped, NEG_INF).softmax(-1)
        count = (probs < filters.min_p.unsqueeze(-1) * probs.amax(-1, keepdim=True)).sum(-1, keepdim=True)
        first = torch.maximum(first, count.clamp_(max=vocab - 1))
    return SortedCandidates(order, cumulative, first)


def draw_from(candidates: SortedCandidates, uniform: Tensor) -> Tensor:
    """uniform [N] float64 in [0, 1) -> tokens [N]: inverse CDF over the allowed tokens, without normalising again."""
    order, cumulative, first = candidates
    below = cumulative.gather(-1, (first - 1).clamp(min=0)).masked_fill(first == 0, 0.0)
    target = below + uniform.unsqueeze(-1) * (cumulative[:, -1:] - below)
    rank = torch.searchsorted(cumulative, target, right=True).clamp_(max=order.shape[-1] - 1)
    return order.gather(-1, torch.maximum(rank, first)).squeeze(-1)


def draw_from_all(scores: Tensor, uniform: Tensor) -> Tensor:
    """scores [N, V] float32, uniform [N] float64 -> tokens [N] of their softmax, which needs no sorting."""
    cumulative = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    rank = torch.searchsorted(cumulative, uniform.unsqueeze(-1) * total, right=True)
    last = torch.searchsorted(cumulative, total)  # the last token of any probability: the product may round to the total
    return torch.minimum(rank, last).squeeze(-1)
