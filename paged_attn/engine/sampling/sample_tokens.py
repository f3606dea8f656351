"""Samples one token per row with the row's own settings, on the device, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.backends.devices import has_triton
from paged_attn.backends.sampling.sampling_tensors import SamplingTensors


def sample_tokens(logits: Tensor, best: Tensor, of: SamplingTensors) -> Tensor:
    """logits [M, V], any floating dtype, not modified; best [M] int64, their most likely tokens -> [N] int64, one for each of `of.rows`.

    Inverts the cumulative sum of probabilities in the order of token ids, after temperature, top-k, top-p and min-p. Tokens tied with the
    last one that top-k keeps are kept; among tokens tied with the last one of top-p, lower ids are dropped. If the largest logit is not
    finite, the token is arbitrary. On a GPU, kernels that do not sort are used (`backends/sampling/sample.py`).
    Source: the order and boundaries of transformers 5.23 (`generation/logits_process.py`).
    """
    if logits.is_cuda and has_triton():
        from paged_attn.backends.sampling import greedy, sample

        if greedy.serves(logits):
            return sample.sample_tokens(logits, best, of)
    return sample_with_torch(logits, of)


def sample_in_place(logits: Tensor, best: Tensor, of: SamplingTensors) -> bool:
    """As `sample_tokens`, but each token replaces the row's most likely one in `best`, unless that is below 0. False if no kernel does
    that, and nothing was done."""
    if logits.is_cuda and has_triton():
        from paged_attn.backends.sampling import greedy, sample

        if greedy.serves(logits):
            sample.sample_in_place(logits, best, of)
            return True
    return False


def sample_with_torch(logits: Tensor, of: SamplingTensors) -> Tensor:
    """`sample_tokens` with PyTorch operations; sorts rows with top-k or top-p."""
    values, temperature = logits.index_select(0, of.rows).float(), of.temperature.unsqueeze(-1)
    largest = values.amax(-1, keepdim=True)
    values -= torch.where((largest / temperature).isneginf(), largest, 0.0)  # otherwise no token would be left
    scores = values / temperature
    scores.clamp_(max=torch.finfo(torch.float32).max)  # finite where the logits are
    if of.first_limited < len(scores):
        forbid_unlikely(scores[of.first_limited :], of)
    if of.min_p is not None:
        shares = scores.softmax(-1)
        scores.masked_fill_(shares < of.min_p.unsqueeze(-1) * shares.amax(-1, keepdim=True), -torch.inf)
    return sample_from_all(scores, of.uniform)


def forbid_unlikely(scores: Tensor, of: SamplingTensors) -> None:
    """Set the scores [L, V] float32 of the last L rows to -inf for tokens that top-k and top-p drop."""
    values, order = torch.sort(scores, dim=-1, stable=True)  # stable: among equals the lower id comes first
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    dropped = torch.zeros_like(scores, dtype=torch.bool)
    if of.lowest is not None:
        dropped = values < values.gather(-1, of.lowest[of.first_limited :].unsqueeze(-1))
        values.masked_fill_(dropped, -torch.inf)
    if of.left_out is not None:
        # float64, whose sums hardly depend on the order
        cumulative = values.softmax(-1).cumsum(-1, dtype=torch.float64)
        below = cumulative <= of.left_out[of.first_limited :].unsqueeze(-1) * cumulative[:, -1:]
        dropped |= below & (ranks < len(ranks) - 1)
    scores.masked_fill_(torch.zeros_like(dropped).scatter_(-1, order, dropped), -torch.inf)


def sample_from_all(scores: Tensor, uniform: Tensor) -> Tensor:
    """scores [N, V] float32, uniform [N] float64 -> tokens [N] sampled from the softmax."""
    cumulative = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    rank = torch.searchsorted(cumulative, uniform.unsqueeze(-1) * total, right=True)
    last = torch.searchsorted(cumulative, total)  # the last token with a probability above 0: the product may round to the total
    return torch.minimum(rank, last).squeeze(-1)
