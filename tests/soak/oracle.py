"""What the unmodified model says to one prompt alone, through its own `generate`, and how far rounding cannot change it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from paged_attn import SamplingParams
from paged_attn.engine.sampling.sampling_state import SamplingState
from paged_attn.engine.sampling.structured.guides import Guides
from tests.engine.models import tokenizer
from tests.sample_once import sample
from tests.tiny_models import VOCAB

NOISE = 5e-4  # some fifty times what another order of float32 sums does to these models' logits
NOISY_COPIES = 16  # each tells of a tie with even odds only; with three of them one tie in eight was taken for firm


@functools.cache
def guides() -> Guides:
    """Those of the engines, whose models have no end token; with the process that reads for them, which stays."""
    made = Guides(tokenizer(), VOCAB, frozenset())
    made.prototype(SamplingParams(regex="a"))
    return made


@dataclass(frozen=True)
class Said:
    """New tokens and their log-probabilities in the model's own distribution; none that noise could change, or that follows such a one.

    `is_whole`: by its guide, nothing can follow.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_whole: bool = False


class Chooser(LogitsProcessor):
    """Chooses by the params, for the logits as they are and as they are with noise: `firm` counts tokens until the first disagreement."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams) -> None:
        self.states = [SamplingState(params, list(prompt), guides().guide(params)) for _ in range(1 + NOISY_COPIES)]
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.firm: int | None = None
        self.is_whole = False
        self.noise = torch.Generator().manual_seed(len(prompt))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.is_whole:
            return scores
        noise = torch.rand(NOISY_COPIES, scores.shape[-1], generator=self.noise) * 2 - 1
        rows = torch.cat([scores, scores + NOISE * noise])
        token, *others = [sampled.token_id for sampled in sample(rows, self.states)]
        if self.firm is None and any(other != token for other in others):
            self.firm = len(self.tokens)
        self.tokens.append(token)
        self.logprobs.append(float(scores.log_softmax(-1)[0, token]))
        for state in self.states:
            state.tokens.append(token)
            self.is_whole = state.guide is not None and not state.guide.goes_on_after(token)
        return torch.full_like(scores, float("-inf")).index_fill_(1, torch.tensor([token]), 0.0)


def say(model: PreTrainedModel, prompt: Sequence[int], params: SamplingParams, never: frozenset[int]) -> Said:
    """Up to `params.max_new_tokens` tokens, ending before the first that is among `never`, or that noise could change."""
    chooser = Chooser(prompt, params)
    ids = torch.tensor([list(prompt)])
    settings: dict[str, Any] = {"max_new_tokens": params.max_new_tokens, "do_sample": False}
    with torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=LogitsProcessorList([chooser]), **settings)
    end = len(chooser.tokens) if chooser.firm is None else chooser.firm
    end = next((i for i, token in enumerate(chooser.tokens[:end]) if token in never), end)
    return Said(tuple(chooser.tokens[:end]), tuple(chooser.logprobs[:end]), chooser.is_whole and end == len(chooser.tokens))
