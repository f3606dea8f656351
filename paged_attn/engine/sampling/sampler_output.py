"""The sampled tokens of a step, and the scores of prompts' own tokens, on their way from the device.

Log-probabilities of tokens and of the most likely alternatives are computed in bounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import PackedInts
from paged_attn.backends.devices import has_triton

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
    """Log-probabilities of a token of each of L rows: -inf of an id that there is no logit for (a padded table has more rows). On a GPU,
    kernels compute them (`backends/sampling/logprobs.py`).

    Args:
        logits: [N, V], any floating dtype; wanted: how many of the most likely tokens each asks for.
        rows, tokens: [L] int64 on the device, rows of the logits; a token below 0 is none.
    """
    most, score = min(max(wanted.values()), logits.shape[-1]), scored_plainly
    if logits.is_cuda and has_triton():
        from paged_attn.backends.sampling import greedy, logprobs

        if greedy.serves(logits) and most <= logprobs.MOST_LIKELY:
            score = logprobs.score_rows
    return Logprobs(list(wanted), list(wanted.values()), *score(logits, rows, tokens, most))


def scored_plainly(logits: Tensor, rows: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`logprobs_of` with PyTorch operations, a block of rows at a time."""
    vocab = logits.shape[-1]
    block = max(BLOCK_BYTES // (4 * vocab), 1)
    numbers, found = torch.arange(vocab, device=logits.device), []
    for few_rows, few_tokens in zip(rows.split(block), tokens.split(block), strict=True):
        values = logits.index_select(0, few_rows).float()
        logprobs, targets = values.log_softmax(-1), few_tokens.clamp(0, vocab - 1).unsqueeze(-1)
        own, its = logprobs.gather(-1, targets).squeeze(-1), values.gather(-1, targets)
        ranks = 1 + (values > its).sum(-1) + ((values == its) & (numbers < targets)).sum(-1)
        ids = most_likely(values, most)
        found.append((torch.where((few_tokens >= vocab) & ~own.isnan(), -torch.inf, own), ranks, ids, logprobs.gather(-1, ids)))
    own, ranks, ids, top = map(torch.cat, zip(*found, strict=True))
    return own, ranks, ids, top


def most_likely(values: Tensor, count: int) -> Tensor:
    """values [L, V] float32 -> ids [L, count], the largest value first and the lower id first among equals; topk alone breaks ties as it
    likes, so it gets whole numbers that are all different: the value in the high bits, the id in the low ones."""
    bits = (values + 0.0).view(torch.int32)  # no -0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(values.shape[-1], device=values.device)
    best = ((ordered << 32) | (LOW_BITS - ids)).topk(count, dim=-1).values
    return LOW_BITS - (best & LOW_BITS)


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
    """Copies of tensors of one device on the host, which start at once; on the CPU, too, as a captured step's memory is the next one's.

    On a GPU, a kernel writes small ones (`backends/host_memory/deliver.py`).
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda) for tensor in tensors]
        self._event = None
        if not tensors[0].is_cuda:
            _copy(tensors, self._copies)
            return
        self._event, hold = torch.cuda.Event(), None
        if has_triton():
            from paged_attn.backends.host_memory import deliver

            if deliver.serves(tensors):
                deliver.deliver(tensors, self._copies)
                hold = deliver.hold
        if hold is None:
            _copy(tensors, self._copies)
        self._event.record(torch.cuda.current_stream(tensors[0].device))
        if hold is not None:
            hold(self._copies, self._event)

    def wait(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._copies


def _copy(tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
    for host, tensor in zip(hosts, tensors, strict=True):
        host.copy_(tensor, non_blocking=True)


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
                    top = tuple(zip(top_ids[:count], values[:count], strict=True))
                    if top and top[-1][1] == -math.inf:  # the least likely one
                        top = tuple(each for each in top if each[1] > -math.inf)
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
