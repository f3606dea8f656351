"""What a model accepts: vocabulary, positions, end tokens."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paged_attn.calling.body import Body
from paged_attn.calling.call_signature import input_embeddings
from paged_attn.engine.generation_config import end_tokens
from paged_attn.engine.model.model_output import TokenIds
from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.passes.fx.model_facts import least, max_positions, text_config
from paged_attn.shown import shown


class PromptTooLongError(ValueError):
    """A prompt of more tokens than there is room for. Its words are those by which Claude Code and LiteLLM know that a conversation must
    be shortened.

    Args:
        count: of the prompt's tokens.
        most: how many there may be, apart from `more`.
        what: the name of `most`.
    """

    def __init__(self, count: int, most: int, what: str, more: int = 0) -> None:
        super().__init__(f"the prompt is too long: {count} tokens > {most}, {what}; shorten it by {count - most - more}")
        self.count, self.most, self.what, self.more = count, most, what, more

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.count, self.most, self.what, self.more), self.__dict__


@dataclass(frozen=True)
class ModelLimits:
    """Limits that the model's own config states, or its tables show; None where there is none.

    Attributes:
        vocab_size: prompts hold ids below it.
        length_borders: see `Runner`.
        num_logits: ids below it can be chosen; a padded table has more.
        bounded: `max_positions` are those of the setting `max_model_len`.
        num_types: token types below it are told from each other; 1: none are.
    """

    vocab_size: int | None
    max_positions: int | None
    eos_token_ids: frozenset[int]
    length_borders: tuple[int, ...] = ()
    num_logits: int | None = None
    bounded: bool = False
    num_types: int = 1

    @classmethod
    def of(cls, model: Any, positions: int | None = None, borders: tuple[int, ...] = (), ids: TokenIds | None = None) -> ModelLimits:
        """The limits of a model.

        Args:
            positions: the limit that the model's graph shows, config included; without it the config's alone.
            ids: what a call of the model showed.
        """
        text = text_config(model)
        if isinstance(model, Body):
            return cls(model.vocab_size, least(model.longest, positions), frozenset(), borders, num_types=model.num_types)
        read, chosen = (None, None) if ids is None else (ids.read, ids.chosen)
        vocab = getattr(input_embeddings(model), "num_embeddings", None) or getattr(text, "vocab_size", None) or read
        eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        eos = eos if eos is not None else getattr(text, "eos_token_id", None)
        longest = max_positions(model) if positions is None else positions
        return cls(vocab, longest, frozenset(end_tokens(eos)), borders, chosen)

    def within(self, longest: int | None) -> ModelLimits:
        """The same with no more positions than `max_model_len`; raises ValueError if the model has fewer."""
        if longest is None:
            return self
        if self.max_positions is not None and longest > self.max_positions:
            raise ValueError(f"max_model_len: got {longest}; allowed: 1 to {self.max_positions}, as many as the model has positions")
        return replace(self, max_positions=longest, bounded=True)

    def parted_at(self, shortest: int, longest: int) -> str:
        """What to say where requests of one batch have tokens on both sides of a border; "" where they have not. transformers computes all
        rows of a call as the longest then."""
        border = next((border for border in self.length_borders if shortest <= border < longest), None)
        return "" if border is None else (
            f"rows of this batch lie on both sides of {border} tokens, where the model's rotation changes: each row is computed as it is "
            "alone, and transformers computes all of them as the longest"
        )  # fmt: skip

    def ends_a_side(self, length: int) -> bool:
        """Whether a request of one token more than `length` needs other keys, and may have so many."""
        return length in self.length_borders and length != self.max_positions

    def checked_prompt(self, ids: Sequence[int], more: int = 0) -> list[int]:
        """The prompt as a list of ints.

        Args:
            more: how many tokens it may have beyond the model's positions.

        Raises:
            ValueError: it is empty, holds ids that this model does not have, or, as `PromptTooLongError`, is longer than its positions.
            TypeError: it is not a list of whole numbers.
        """
        if isinstance(ids, (str, bytes, bytearray)):
            raise TypeError(f"a prompt of token ids is {shown(ids)}; allowed is a list of int; tokenize it first")
        try:
            packed = array("q", ids)  # half the time of a list of ints, each looked at
        except TypeError as error:
            raise TypeError(f"a prompt of token ids is a {type(ids).__name__}, {shown(ids)}; allowed is a list of int") from error
        except OverflowError:
            raise self._out_of_range([operator.index(i) for i in ids]) from None
        prompt = packed.tolist()
        if not prompt:
            raise ValueError("the prompt is empty; give at least one token (for a fresh start, the model's BOS or end-of-text token)")
        if self.vocab_size is not None:
            numbers = np.frombuffer(packed, np.int64)
            if numbers.min() < 0 or numbers.max() >= self.vocab_size:
                raise self._out_of_range(prompt)
        if self.max_positions is not None and len(prompt) > self.max_positions + more:
            raise PromptTooLongError(len(prompt), self.max_positions, "max_model_len" if self.bounded else "the model's positions", more)
        return prompt

    def _out_of_range(self, prompt: Sequence[int]) -> ValueError:
        limit = 2**63 if self.vocab_size is None else self.vocab_size
        position = next(i for i, token in enumerate(prompt) if not 0 <= token < limit)
        return ValueError(
            f"token id {shown(prompt[position])} at position {position} of the prompt is out of range; this model has ids 0 to {limit - 1}"
        )

    def check_chosen(self, params: SamplingParams) -> None:
        """Raises ValueError for a token id that this model cannot choose, and that the params have something to say of."""
        limit = self.vocab_size if self.num_logits is None else self.num_logits
        named = {"logit_bias": (token for token, _ in params.biases), "allowed_token_ids": params.allowed_token_ids or ()}
        for name, tokens in named.items():
            if limit is not None and (wrong := next((token for token in tokens if token >= limit), None)) is not None:
                raise ValueError(f"{name}: got token id {shown(wrong)}; allowed: 0 to {limit - 1}, what the model's logits are of")

    def allowed_new_tokens(self, prompt: int, wanted: int) -> int:
        """`wanted`, cut so that no token lies past the model's positions (such a request ends with "length")."""
        return wanted if self.max_positions is None else max(min(wanted, self.max_positions - prompt + 1), 0)
