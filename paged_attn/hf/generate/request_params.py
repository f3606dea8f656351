"""transformers' prepared logits processors as SamplingParams: on the device what the sampler supports, on the host everything else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as kinds

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.sampling_params import MIN_TEMPERATURE, SamplingParams
from paged_attn.hf.generate.refuse import ON_PAGES

_MOST_SEEDS = 2**63 - 1
Processor = Callable[[Tensor, Tensor], Tensor]
# transformers' processors whose result for a row depends only on that row. Some are newer than 5.17.
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


def settings_of(processors: Sequence[Any], samples: bool, paddings: Sequence[int]) -> tuple[dict[str, Any], list[Any]]:
    """SamplingParams' settings that replace the first and the last processors, and the remaining processors between them.

    The sampler's order is: repetition penalty, processors, temperature, top-k, top-p, min-p. A processor elsewhere, or with a setting
    that the sampler does not support, remains a processor.
    """
    rest, settings = list(processors), dict[str, Any]({"temperature": 1.0} if samples else {})
    if rest and type(rest[0]) is kinds.RepetitionPenaltyLogitsProcessor and _ignores_padding(rest[0], paddings):
        settings["repetition_penalty"] = float(rest.pop(0).penalty)
    for kind, name in (
        (kinds.MinPLogitsWarper, "min_p"), (kinds.TopPLogitsWarper, "top_p"), (kinds.TopKLogitsWarper, "top_k"),
        (kinds.TemperatureLogitsWarper, "temperature"),
    ):  # fmt: skip
        if samples and rest and type(rest[-1]) is kind and _is_known(rest[-1], getattr(rest[-1], name), name):
            settings[name] = getattr(rest.pop(), name)
    return settings, rest


def params_of_rows(
    processors: Sequence[Any], samples: bool, padded: Tensor, paddings: Sequence[int], max_new_tokens: int, ends: frozenset[int]
) -> list[SamplingParams]:
    """SamplingParams for each row of a batch.

    Args:
        processors: as prepared by `generate`; for sampling they end with its filters.
        samples: draw tokens, with seeds from torch's default generator.
        padded: [B, L] int64; paddings: number of padding tokens on each row's left.
        ends: token ids that end a row.
    """
    settings, rest = settings_of(processors, samples, paddings)
    settings |= {"max_new_tokens": max_new_tokens, "stop_token_ids": tuple(sorted(ends)), "ignore_eos": True}
    seeds = _seeds(samples, len(padded))
    hosts = [(each,) if rest else () for each in _row_processors(rest, padded, paddings)]
    return [SamplingParams(seed=seed, logits_processors=host, **settings) for seed, host in zip(seeds, hosts, strict=True)]


def params_with_scores(
    processors: Sequence[Any], samples: bool, padded: Tensor, paddings: Sequence[int], max_new_tokens: int, ends: frozenset[int],
    pad: int | None,
) -> tuple[list[SamplingParams], list[ScoreKeeper]]:  # fmt: skip
    """`params_of_rows` with all processors on the host, which keep each row's logits and scores; finished rows continue with `pad`."""
    seeds, lengths = _seeds(samples, len(padded)), [padded.shape[1] - padding for padding in paddings]
    by_row = zip(_row_processors(processors, padded, paddings), lengths, strict=True)
    keepers = [ScoreKeeper(each, length, ends, pad) for each, length in by_row]
    temperature = 1.0 if samples else 0.0
    return [
        SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, ignore_eos=True, logits_processors=(keeper,))
        for seed, keeper in zip(seeds, keepers, strict=True)
    ], keepers


def _seeds(samples: bool, rows: int) -> list[Any]:
    return torch.randint(_MOST_SEEDS, (rows,)).tolist() if samples else [None] * rows


def _row_processors(processors: Sequence[Any], padded: Tensor, paddings: Sequence[int]) -> list[RowProcessors]:
    return [
        RowProcessors([of_row(each, row, len(padded)) for each in processors], padded[row, :padding])
        for row, padding in enumerate(paddings)
    ]  # fmt: skip


def _ignores_padding(processor: Any, paddings: Sequence[int]) -> bool:
    """Whether it counts all tokens of a prompt except the padding."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    kept = ignored.tolist() == list(paddings) if isinstance(ignored, Tensor) else not ignored and not any(paddings)
    return kept and 0 < processor.penalty < float("inf")


def _is_known(processor: Any, value: Any, name: str) -> bool:
    plain = getattr(processor, "filter_value", -float("inf")) == -float("inf") and getattr(processor, "min_tokens_to_keep", 1) == 1
    return plain and {"temperature": value >= MIN_TEMPERATURE, "top_p": 0 < value <= 1}.get(name, True)


def of_row(processor: Any, row: int, rows: int) -> Processor:
    """The processor of a batch of `rows`, as it applies to one of its rows in calls with only that row. Raises UnsupportedError: one of
    transformers' processors that has state for each row."""
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
            f"{kind.__name__} goes through a batch row by row, and paged_attn.generate calls logits processors for one row each: give "
            f"one prompt at a time. For a batch {ON_PAGES}"
        )
    return processor  # type: ignore[no-any-return]


class RowProcessors:
    """The processors of one row, in order: input_ids [1, T] without padding, scores [1, V] -> scores [1, V]. `padding`: [P] int64, the
    row's padding on the left, which transformers' processors count and see."""

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
    """Runs the processors of a row, and keeps their input and output; a finished row continues with padding, as in transformers' loop.

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
        del self.logits[done:], self.scores[done:]  # drop rows of a step that is run again
        self.logits.append(scores[0].clone())
        scores = self._processors(input_ids, scores)
        self.scores.append(scores[0].clone())
        if self._pad is None or self._ends.isdisjoint(input_ids[0, self._length :].tolist()):
            return scores
        forced = torch.full_like(scores, float("-inf"))
        forced[0, self._pad] = 0.0
        return forced
