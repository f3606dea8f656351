"""Counts of each request's tokens, on the device, for penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import PackedInts
from paged_attn.backends.devices import has_triton
from paged_attn.backends.sampling.sampling_tensors import IN_PROMPT, OF_OUTPUT
from paged_attn.engine.sampling.sampling_state import SamplingState

FIRST_ROWS = 8


class TokenCounts:
    """A row [vocabulary] int32 per request that needs one; 0 for tokens that were never there.

    Rows are filled from the host when a request is first seen, and then follow what is chosen without the host.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary, self.device = vocabulary, device
        self.counts = torch.zeros(FIRST_ROWS, vocabulary, dtype=torch.int32, device=device)
        self._rows: dict[SamplingState, int] = {}
        self._free = list(range(FIRST_ROWS))

    def rows_of(self, states: Sequence[SamplingState]) -> list[int]:
        """Their rows of `counts`, up to date. Raises ValueError: a token was chosen that the vocabulary does not have."""
        new = [state for state in states if state not in self._rows]
        if new:
            self._fill(new)
        return [self._rows[state] for state in states]

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Count one more token [N] for each of some rows [N], all different; negative ones do not count."""
        flat = self.counts.view(-1)
        elements = rows * self.vocabulary + tokens.clamp(min=0)
        flat[elements] = flat[elements] + (tokens >= 0)

    def forget(self, state: SamplingState) -> None:
        """The request ended, or what was counted for it was not kept."""
        if (row := self._rows.pop(state, None)) is not None:
            self._free.append(row)

    def _fill(self, states: Sequence[SamplingState]) -> None:
        counted = [self._counted(state) for state in states]
        while len(self._free) < len(states):
            old = len(self.counts)
            self.counts = torch.cat([self.counts, torch.zeros_like(self.counts)])
            self._free += range(old, 2 * old)
        rows = [self._free.pop() for _ in states]
        total = sum(len(tokens) for tokens, _ in counted)
        packed = PackedInts((len(rows), total), (total,), self.device)
        packed.host[0][:] = rows
        packed.host[1][:] = np.concatenate([row * self.vocabulary + tokens for row, (tokens, _) in zip(rows, counted, strict=True)])
        packed.host[2][:] = np.concatenate([counts for _, counts in counted])
        fresh, elements, values = packed.to_device()
        self.counts.index_fill_(0, fresh, 0)
        self.counts.view(-1)[elements] = values
        self._rows.update(zip(states, rows, strict=True))

    def _counted(self, state: SamplingState) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Distinct tokens that there are logits for, and what is counted of each: the prompt may hold other ids, of a padded table."""
        tokens = np.array(state.tokens, np.int64)
        prompt, output = tokens[: state.num_prompt], tokens[state.num_prompt :]
        wrong = np.concatenate([prompt[prompt < 0], output[(output < 0) | (output >= self.vocabulary)]])
        if len(wrong):
            raise ValueError(f"tokens so far: got id {wrong[0]}; allowed: 0 to {self.vocabulary - 1}, what the model's logits are of")
        prompt = np.unique(prompt[prompt < self.vocabulary])
        distinct, index = np.unique(np.concatenate([prompt, output]), return_inverse=True)
        counts = np.bincount(index[len(prompt) :], minlength=len(distinct))
        counts[index[: len(prompt)]] += IN_PROMPT
        return distinct, counts


def penalise(scores: Tensor, rows: Tensor, counts: Tensor, count_rows: Tensor, penalties: tuple[Tensor, Tensor, Tensor]) -> None:
    """Penalties for some rows [L] of scores [N, V] float32, in place, by rows [L] of counts [C, V]. On a GPU, a kernel does what
    `penalised` says (`backends/sampling/edits.py`)."""
    if scores.is_cuda and has_triton():
        from paged_attn.backends.sampling import edits

        edits.penalise(scores, rows, counts, count_rows, penalties)
    else:
        scores.index_copy_(0, rows, penalised(scores.index_select(0, rows), counts.index_select(0, count_rows), *penalties))


def penalised(scores: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """scores, counts [N, V] and penalties [N] -> scores [N, V] float32.

    A score may become -inf, but not inf. Repetition as in transformers 5.23 (`RepetitionPenaltyLogitsProcessor`: prompt and output); then
    frequency and presence as OpenAI documents them, of the output alone.
    """
    repetition = repetition.unsqueeze(-1)
    repeated = torch.where(scores < 0, scores * repetition, (scores / repetition).clamp(max=torch.finfo(scores.dtype).max))
    scores = torch.where(counts != 0, repeated, scores)
    output = counts & OF_OUTPUT
    return scores - output * frequency.unsqueeze(-1) - (output > 0) * presence.unsqueeze(-1)
