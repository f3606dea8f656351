"""Tokens of texts, and of pairs of texts that a model reads together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from paged_attn.shown import shown
from paged_attn.truncation import Cut

Text = str | Sequence[int]


class PairTokens(NamedTuple):
    """Two texts in one row, or one: token ids, and which of both texts a token is of where the tokenizer says so."""

    ids: Sequence[int]
    token_types: list[int] | None


def pair_tokens(tokenizer: Any, first: str, second: str, cut: Cut | None = None) -> PairTokens:
    """As transformers' tokenizer joins two texts, and shortens the longer one where they are to be cut.

    Raises:
        ValueError: there is no tokenizer.
    """
    if tokenizer is None:
        raise ValueError("a pair of texts is joined by the model's tokenizer, and there is none; give LLM(model, tokenizer=...)")
    encoded = tokenizer(first, second, **({} if cut is None else {"truncation": "longest_first", "max_length": cut.most}))
    return PairTokens(list(encoded.input_ids), encoded.get("token_type_ids"))


def paired(text_1: Any, text_2: Any) -> list[tuple[str, str]]:
    """One text with each of many, or texts with texts.

    Raises:
        ValueError: two lists of different lengths. TypeError: no texts. Both begin with the name of the side at fault.
    """
    lists = [[given] if isinstance(given, str) else given for given in (text_1, text_2)]
    for name, given, texts in zip(("text_1", "text_2"), (text_1, text_2), lists, strict=True):
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(each, str) for each in texts):
            raise TypeError(f"{name}: got {shown(given)}; allowed: a text, or a list of texts")
    left, right = list(lists[0]), list(lists[1])
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        raise ValueError(f"text_2: got {len(right)} texts beside {len(left)} of text_1; allowed: as many, or one text_1 for all")
    return list(zip(left, right, strict=True))
