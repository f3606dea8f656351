"""Log-probabilities of tokens and of the most likely alternatives, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_BYTES = 16 << 20  # float32 log-probabilities per block; finding the largest takes some six times as much
LOW_BITS = 0xFFFFFFFF


class Logprobs(NamedTuple):
    """rows: which of the step's; own [L] float32, NaN where a row's logits are not finite; ranks [L] int64, from 1 for the most likely
    token; top_ids and top [L, K], of which row i wants the first counts[i]."""

    rows: list[int]
    counts: list[int]
    own: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor


def logprobs_of(logits: Tensor, wanted: Mapping[int, int], rows: Tensor, tokens: Tensor) -> Logprobs:
    """Log-probabilities of a token of each of L rows: -inf of an id that there is no logit for (a padded table has more rows).

    Args:
        logits: [N, V], any floating dtype; wanted: how many of the most likely tokens each asks for.
        rows, tokens: [L] int64 on the device, rows of the logits; a token below 0 is none.
    """
    vocab = logits.shape[-1]
    most, block = min(max(wanted.values()), vocab), max(BLOCK_BYTES // (4 * vocab), 1)
    numbers, found = torch.arange(vocab, device=logits.device), []
    for few_rows, few_tokens in zip(rows.split(block), tokens.split(block), strict=True):
        logprobs = logits.index_select(0, few_rows).float().log_softmax(-1)
        targets = few_tokens.clamp(0, vocab - 1).unsqueeze(-1)
        own = logprobs.gather(-1, targets)
        ranks = 1 + (logprobs > own).sum(-1) + ((logprobs == own) & (numbers < targets)).sum(-1)
        own, ids = own.squeeze(-1), most_likely(logprobs, most)
        found.append((torch.where((few_tokens >= vocab) & ~own.isnan(), -torch.inf, own), ranks, ids, logprobs.gather(-1, ids)))
    own, ranks, ids, top = map(torch.cat, zip(*found, strict=True))
    return Logprobs(list(wanted), list(wanted.values()), own, ranks, ids, top)


def most_likely(values: Tensor, count: int) -> Tensor:
    """values [L, V] float32 -> ids [L, count], the largest value first and the lower id first among equals; topk alone breaks ties as it
    likes, so it gets whole numbers that are all different: the value in the high bits, the id in the low ones."""
    bits = values.contiguous().view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(values.shape[-1], device=values.device)
    best = ((ordered << 32) | (LOW_BITS - ids)).topk(count, dim=-1).values
    return LOW_BITS - (best & LOW_BITS)
