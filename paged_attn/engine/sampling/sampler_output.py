"""What a step chose, on its way from the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LOW_BITS = 0xFFFFFFFF


class SampledToken(NamedTuple):
    """A chosen token and, when asked for, log-probabilities of the model's own distribution (before any penalty).

    `top_logprobs` has the most likely token first, the lower id first among equals, and none of probability 0.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


class ChosenTokens(NamedTuple):
    """Of each row of a step its token, BAD_LOGITS or NONE_LEFT where there is none, and what was asked about it, None where nothing was."""

    ids: list[int]
    known: list[SampledToken | None]


class Logprobs(NamedTuple):
    """rows: which of the step's; own [L] float32, top_ids and top [L, K], of which row i wants the first counts[i]."""

    rows: list[int]
    counts: list[int]
    own: Tensor
    top_ids: Tensor
    top: Tensor


class HostCopies:
    """Copies of tensors of one device on the host, which start at once; on the CPU, too, as a captured step's memory is the next one's."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda) for tensor in tensors]
        self._copies = [host.copy_(tensor, non_blocking=True) for host, tensor in zip(hosts, tensors, strict=True)]
        self._event = None
        if tensors[0].is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._copies


BAD_LOGITS, NONE_LEFT = -1, -2  # in place of a token: the model's logits were not finite; what the request asked for leaves no token


class SamplerOutput:
    """Tokens [N] int64 of one step, BAD_LOGITS or NONE_LEFT where there is none, and log-probabilities.

    The copy to the host starts at once. `tokens` may lie in memory that the next step overwrites.
    """

    def __init__(self, tokens: Tensor, logprobs: Logprobs | None) -> None:
        self.tokens = tokens
        self._logprobs = logprobs
        self._copies = HostCopies([tokens] if logprobs is None else [tokens, logprobs.own, logprobs.top_ids, logprobs.top])

    def wait(self) -> ChosenTokens:
        """Until the copies are there."""
        tokens, *about = self._copies.wait()
        ids: list[int] = tokens.tolist()
        chosen = ChosenTokens(ids, [None] * len(ids))
        if self._logprobs is not None:
            rows, counts = self._logprobs.rows, self._logprobs.counts
            for row, count, own, top_ids, values in zip(rows, counts, *(copy.tolist() for copy in about), strict=True):
                if ids[row] >= 0:
                    top = tuple((i, value) for i, value in zip(top_ids[:count], values[:count], strict=True) if value > -math.inf)
                    chosen.known[row] = SampledToken(ids[row], own, top)
        return chosen


def logprobs_of(logits: Tensor, tokens: Tensor, wanted: Mapping[int, int], rows_on_device: Tensor) -> Logprobs:
    """Log-probabilities of the chosen tokens [N] and of the most likely ones.

    Args:
        logits: [N, V]; wanted: how many of the most likely each of L rows asks for; rows_on_device: those rows [L] int64.
    """
    rows, counts = list(wanted), list(wanted.values())
    logprobs = logits.index_select(0, rows_on_device).float().log_softmax(-1)
    own = logprobs.gather(-1, tokens.index_select(0, rows_on_device).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    ids = most_likely(logprobs, min(max(counts), logits.shape[-1]))
    return Logprobs(rows, counts, own, ids, logprobs.gather(-1, ids))


def most_likely(values: Tensor, count: int) -> Tensor:
    """values [L, V] float32 -> ids [L, count], the largest value first and the lower id first among equals; topk alone breaks ties as it
    likes, so it gets whole numbers that are all different: the value in the high bits, the id in the low ones."""
    bits = values.contiguous().view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(values.shape[-1], device=values.device)
    best = ((ordered << 32) | (LOW_BITS - ids)).topk(count, dim=-1).values
    return LOW_BITS - (best & LOW_BITS)
