"""What `LLM.embed`, `classify` and `score` return, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Out = TypeVar("Out")


@dataclass(frozen=True)
class EmbeddingValues:
    """embedding: as many numbers as the model's hidden states have, or as were asked for."""

    embedding: list[float]


@dataclass(frozen=True)
class ClassValues:
    """logits: one for each label, as the model gives them; probs: what they come to (softmax; one label alone, or several that may hold
    together: sigmoid; a regression: the numbers themselves)."""

    probs: list[float]
    logits: list[float]


@dataclass(frozen=True)
class ScoreValues:
    """score: how well two texts go together, the higher the better."""

    score: float


@dataclass(frozen=True)
class PoolingOutput(Generic[Out]):
    """The result of one text, or of one pair.

    Attributes:
        index: of the text in the call.
        outputs: its values.
        prompt_token_ids: its tokens, of a pair of embedded texts both one after the other.
        cached_tokens: those that came from the prefix cache.
    """

    index: int
    outputs: Out
    prompt_token_ids: list[int]
    cached_tokens: int = 0
