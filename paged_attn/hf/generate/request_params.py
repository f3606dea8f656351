"""transformers' prepared logits processors as SamplingParams: on the device what the sampler knows, on the host all else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as kinds

from paged_attn.engine.sampling_params import MIN_TEMPERATURE, SamplingParams
from paged_attn.hf.generate.row_processors import RowProcessors, ScoreKeeper, of_row

_MOST_SEEDS = 2**63 - 1


def settings_of(processors: Sequence[Any], samples: bool, paddings: Sequence[int]) -> tuple[dict[str, Any], list[Any]]:
    """SamplingParams' own settings that do what the first and the last processors do, and the processors between them.

    The sampler's order is: repetition penalty, processors, temperature, top-k, top-p, min-p. What stands in another order, or is set as
    the sampler cannot, stays a processor.
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
    """One for each row of a batch.

    Args:
        processors: prepared by `generate`, which for sampling end with its filters.
        samples: draw tokens; their seeds come from torch's default generator.
        padded: [B, L] int64; paddings: how much of each row is padding, on its left.
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
    """The same with all processors on the host, where each row's logits and scores are kept; rows that have ended go on with `pad`."""
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
    """Whether it counts every token of a prompt but the padding."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    kept = ignored.tolist() == list(paddings) if isinstance(ignored, Tensor) else not ignored and not any(paddings)
    return kept and 0 < processor.penalty < float("inf")


def _is_known(processor: Any, value: Any, name: str) -> bool:
    plain = getattr(processor, "filter_value", -float("inf")) == -float("inf") and getattr(processor, "min_tokens_to_keep", 1) == 1
    return plain and {"temperature": value >= MIN_TEMPERATURE, "top_p": 0 < value <= 1}.get(name, True)
