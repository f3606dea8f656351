"""Log-probabilities of a prompt's own tokens, from the logits of the tokens before them, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import PackedInts
from paged_attn.engine.sampling.logprobs import logprobs_of
from paged_attn.engine.sampling.sampler_output import BAD_LOGITS, SampledToken, SamplerOutput

LOGITS_BYTES = 256 << 20  # most float32 logits that one step computes for prompt scores
LEAST_ROWS = 16


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
