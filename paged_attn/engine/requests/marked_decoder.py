"""Tokens to text with some of the special tokens, such as those that tell where reasoning and calls of tools are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class MarkedDecoder:
    """A `TokenDecoder` that leaves special tokens in the text which its tokenizer would skip.

    Args:
        kept: ids of special tokens that stay.
    """

    def __init__(self, tokenizer: Any, kept: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = special_ids(tokenizer) - kept

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            token_ids = [token for token in token_ids if token not in self._skipped]
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def special_ids(tokenizer: Any) -> frozenset[int]:
    """All tokens that a tokenizer skips when it decodes without special tokens."""
    added = {id for id, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    return frozenset(added.union(tokenizer.all_special_ids))
