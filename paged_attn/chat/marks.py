"""Texts that structure an answer, such as tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_attn.engine.requests.detokenizer import special_ids


def overlap(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark; 0 if none."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


def own_token(tokenizer: Any, text: str) -> int | None:
    """The id of the added token that this text is, special or not; None if it is none."""
    id: int | None = tokenizer.get_added_vocab().get(text)
    return id


def kept_ids(tokenizer: Any, marks: Sequence[str]) -> frozenset[int]:
    """Which special tokens must stay in the text of an answer so that these marks can be seen."""
    return frozenset({id for mark in marks if (id := own_token(tokenizer, mark)) is not None} & special_ids(tokenizer))
