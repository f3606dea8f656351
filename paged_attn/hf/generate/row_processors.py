"""Logits processors of a padded batch, called for one of its rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as kinds

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.hf.generate.refuse import ON_PAGES

Processor = Callable[[Tensor, Tensor], Tensor]
# Of transformers: what they make of a row depends on nothing but that row. Some are younger than 5.17.
_BY_ROW = {
    getattr(kinds, name, None)
    for name in (
        "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "TemperatureLogitsWarper", "TopPLogitsWarper", "TopKLogitsWarper",
        "TopHLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper",
        "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor", "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "ExponentialDecayLengthPenalty", "LogitNormalization",
        "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "WatermarkLogitsProcessor",
    )
}  # fmt: skip


def of_row(processor: Any, row: int, rows: int) -> Processor:
    """What the processor of a batch of `rows` does to one of them, for calls with that row alone.

    Raises:
        UnsupportedError: one of transformers that holds something of each row.
    """
    kind = type(processor)
    if kind is kinds.RepetitionPenaltyLogitsProcessor:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = ignored[row : row + 1]
    elif kind is kinds.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return kinds.PrefixConstrainedLogitsProcessor(lambda _, sent: allowed(row, sent), 1)
    elif rows > 1 and kind.__module__ == kinds.__name__ and kind not in _BY_ROW:
        raise UnsupportedError(
            f"{kind.__name__} goes through a batch row by row, and paged_attn.generate calls logits processors for each row alone: give "
            f"one prompt at a time. For a batch {ON_PAGES}"
        )
    return processor  # type: ignore[no-any-return]


class RowProcessors:
    """The processors of one row, in order: input_ids [1, T] without padding, scores [1, V] -> scores [1, V].

    Args:
        padding: [P] int64, the padding on the left of the row in its batch, which processors of transformers count and see.
    """

    def __init__(self, processors: Sequence[Processor], padding: Tensor) -> None:
        self.processors, self.padding = processors, padding

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.processors))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = torch.cat([self.padding.to(input_ids.device)[None], input_ids], 1)
        for processor in self.processors:
            scores = processor(ids, scores)
        return scores


class ScoreKeeper:
    """The same, and keeps what it was given and what it gave; a row that has ended goes on with padding, as in transformers' loop.

    Args:
        length: tokens of the row's prompt, without padding.
        ends: ids that end the row; after one of them `pad` is forced.

    Attributes:
        logits, scores: [V] float32 of each new token.
    """

    def __init__(self, processors: RowProcessors, length: int, ends: frozenset[int], pad: int | None) -> None:
        self._processors, self._length, self._ends, self._pad = processors, length, ends, pad
        self.logits: list[Tensor] = []
        self.scores: list[Tensor] = []

    def __repr__(self) -> str:
        return repr(self._processors)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        done = input_ids.shape[1] - self._length
        del self.logits[done:], self.scores[done:]  # of a step that is done again
        self.logits.append(scores[0].clone())
        scores = self._processors(input_ids, scores)
        self.scores.append(scores[0].clone())
        if self._pad is None or self._ends.isdisjoint(input_ids[0, self._length :].tolist()):
            return scores
        forced = torch.full_like(scores, float("-inf"))
        forced[0, self._pad] = 0.0
        return forced
