"""Log-probabilities of a prompt's own tokens, from the logits of the tokens before them, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import PackedInts
from paged_attn.engine.sampling.sampler_output import Logprobs, SampledToken, SamplerOutput, most_likely

LOGITS_BYTES = 256 << 20  # of float32 logits that a step computes for scores at most
BLOCK_BYTES = 16 << 20  # of float32 log-probabilities at a time; finding the largest takes some six times as much
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
        on_device = packed.to_device()
        self._output = SamplerOutput(*_scored(logits.detach(), on_device[0], on_device[1], likely))

    def wait(self) -> list[list[SampledToken] | None]:
        """Of each part its tokens with their log-probabilities, None where logits were not finite."""
        known = iter(self._output.wait().known)
        scored = [[next(known) for _ in range(count)] for count in self._counts]
        return [None if None in part else [token for token in part if token is not None] for part in scored]


def _scored(logits: Tensor, rows: Tensor, targets: Tensor, likely: Sequence[int]) -> tuple[Tensor, Logprobs]:
    """rows and targets [L] int64 -> the targets, -1 where the logits [V] of their row are not finite, and their log-probabilities: -inf of
    ids that there are no logits for (a padded table has more rows)."""
    most, vocab = min(max(likely), logits.shape[-1]), logits.shape[-1]
    block = max(BLOCK_BYTES // (4 * vocab), 1)
    tokens, own, top_ids, top = [], [], [], []
    for few_rows, few_targets in zip(rows.split(block), targets.split(block), strict=True):
        chosen = logits.index_select(0, few_rows).float()
        tokens.append(torch.where(chosen.amax(-1).isfinite(), few_targets, -1))  # NaN counts as the largest
        logprobs = chosen.log_softmax(-1)
        known = logprobs.gather(-1, few_targets.clamp(max=vocab - 1).unsqueeze(-1)).squeeze(-1)
        own.append(known.masked_fill(few_targets >= vocab, -torch.inf))
        top_ids.append(most_likely(logprobs, most))
        top.append(logprobs.gather(-1, top_ids[-1]))
    return torch.cat(tokens), Logprobs(list(range(len(likely))), list(likely), torch.cat(own), torch.cat(top_ids), torch.cat(top))
