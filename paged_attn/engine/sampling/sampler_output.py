"""The sampled tokens of a step, and the scores of prompts' own tokens, on their way from the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import PackedInts
from paged_attn.engine.sampling.logprobs import Logprobs, logprobs_of

LOGITS_BYTES = 256 << 20  # most float32 logits that one step computes for prompt scores
LEAST_ROWS = 16


class SampledToken(NamedTuple):
    """A chosen token and, when asked for, log-probabilities of the model's own distribution (before any penalty).

    `top_logprobs` has the most likely token first, the lower id first among equals, and none of probability 0; `rank` is the token's own
    place in that order, from 1.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    rank: int | None = None


class ChosenTokens(NamedTuple):
    """The token of each row of a step (BAD_LOGITS or NONE_LEFT: there is none), and what was asked about it (None: nothing)."""

    ids: list[int]
    known: list[SampledToken | None]


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
        self._copies = HostCopies([tokens] if logprobs is None else [tokens, logprobs.own, logprobs.ranks, logprobs.top_ids, logprobs.top])

    def wait(self) -> ChosenTokens:
        """Until the copies are there."""
        tokens, *about = self._copies.wait()
        ids: list[int] = tokens.tolist()
        chosen = ChosenTokens(ids, [None] * len(ids))
        if self._logprobs is not None:
            rows, counts = self._logprobs.rows, self._logprobs.counts
            for row, count, own, rank, top_ids, values in zip(rows, counts, *(copy.tolist() for copy in about), strict=True):
                if ids[row] >= 0:
                    top = tuple((i, value) for i, value in zip(top_ids[:count], values[:count], strict=True) if value > -math.inf)
                    chosen.known[row] = SampledToken(ids[row], own, top, rank)
        return chosen


class ScoredTokens(NamedTuple):
    """Consecutive tokens of one prompt. Rows `first_row` and after of a step's logits are those of the tokens before them; `num_likely` of
    the most likely tokens are wanted with each."""

    first_row: int
    tokens: Sequence[int]
    num_likely: int


def score_rows(vocab_size: int) -> int:
    """How many tokens a step may score, so that their logits stay within LOGITS_BYTES."""
    return max(LOGITS_BYTES // (4 * vocab_size), LEAST_ROWS)


class PromptScores:
    """The scores of one step on their way to the host; nothing here waits for the device but `wait`.

    Args:
        logits: [N, V], any floating dtype; they may be overwritten afterwards.
        parts: what to score, of one prompt after another.
    """

    def __init__(self, logits: Tensor, parts: Sequence[ScoredTokens]) -> None:
        self._counts = [len(part.tokens) for part in parts]
        packed = PackedInts((sum(self._counts),) * 2, (), logits.device)
        rows, targets = packed.host
        rows[:] = [row for part in parts for row in range(part.first_row, part.first_row + len(part.tokens))]
        targets[:] = [token for part in parts for token in part.tokens]
        likely = [part.num_likely for part in parts for _ in part.tokens]
        rows_on_device, tokens = packed.to_device()
        scores = logprobs_of(logits.detach(), dict(enumerate(likely)), rows_on_device, tokens)
        self._output = SamplerOutput(torch.where(scores.own.isnan(), BAD_LOGITS, tokens), scores)

    def wait(self) -> list[list[SampledToken] | None]:
        """The tokens of each part with their log-probabilities, None where logits were not finite."""
        known = iter(self._output.wait().known)
        scored = [[next(known) for _ in range(count)] for count in self._counts]
        return [None if None in part else [token for token in part if token is not None] for part in scored]
