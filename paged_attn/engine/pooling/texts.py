"""Tokens of texts, and of pairs of texts that one model reads together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from paged_attn.shown import shown

Text = str | Sequence[int]


class PairTokens(NamedTuple):
    """Two texts in one row, or one: token ids, and which of both texts a token is of where the tokenizer says so."""

    ids: Sequence[int]
    token_types: list[int] | None


def pair_tokens(tokenizer: Any, first: str, second: str) -> PairTokens:
    """As transformers' tokenizer joins two texts.

    Raises:
        ValueError: there is no tokenizer.
    """
    if tokenizer is None:
        raise ValueError("a pair of texts is joined by the model's tokenizer, and there is none; give LLM(model, tokenizer=...)")
    encoded = tokenizer(first, second)
    return PairTokens(list(encoded.input_ids), encoded.get("token_type_ids"))


def paired(first: Any, second: Any) -> list[tuple[str, str]]:
    """One text with each of many, or texts with texts.

    Raises:
        ValueError: two lists of different lengths. TypeError: no texts.
    """
    lists = [[given] if isinstance(given, str) else given for given in (first, second)]
    for which, given, texts in zip(("first", "second"), (first, second), lists, strict=True):
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(each, str) for each in texts):
            raise TypeError(f"score: got {shown(given)} as the {which} side; allowed: a text, or a list of texts")
    left, right = list(lists[0]), list(lists[1])
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        raise ValueError(f"score got {len(left)} and {len(right)} texts; allowed: one and many, or as many as there are on the other side")
    return list(zip(left, right, strict=True))
