"""Texts that structure an answer, such as tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_attn.engine.requests.detokenizer import special_ids


def own_token(tokenizer: Any, text: str) -> int | None:
    """The id of the added token that this text is, special or not; None if it is none."""
    id: int | None = tokenizer.get_added_vocab().get(text)
    return id


def kept_ids(tokenizer: Any, marks: Sequence[str]) -> frozenset[int]:
    """Which special tokens must stay in the text of an answer so that these marks can be seen."""
    return frozenset({id for mark in marks if (id := own_token(tokenizer, mark)) is not None} & special_ids(tokenizer))
