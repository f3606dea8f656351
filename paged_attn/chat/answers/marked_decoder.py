"""Tokens to text with the special tokens that tell where reasoning and calls are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from paged_attn.chat.marks import own_token


class MarkedDecoder:
    """A tokenizer whose `decode` leaves some special tokens in the text that it would skip; see `Engine.add_request`.

    Args:
        kept: ids of special tokens; None keeps all of them.
    """

    def __init__(self, tokenizer: Any, kept: frozenset[int] | None) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset() if kept is None else special_ids(tokenizer) - kept

    def with_tokenizer(self, tokenizer: Any) -> MarkedDecoder:
        """The same over an equal tokenizer."""
        other = copy.copy(self)
        other._tokenizer = tokenizer
        return other

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            token_ids = [token for token in token_ids if token not in self._skipped]
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def special_ids(tokenizer: Any) -> frozenset[int]:
    added = {id for id, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    return frozenset(added.union(tokenizer.all_special_ids))


def decoder_for(tokenizer: Any, marks: Sequence[str]) -> MarkedDecoder | None:
    """A decoder that keeps these marks; None if the tokenizer itself does."""
    special = special_ids(tokenizer)
    kept = frozenset(id for mark in marks if (id := own_token(tokenizer, mark)) is not None and id in special)
    return MarkedDecoder(tokenizer, kept) if kept else None
