"""Truncates prompts to a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

from paged_attn.shown import shown

ALL_ROOM = -1


class Cut(NamedTuple):
    """At most so many tokens are kept of a prompt: its last ones, which a continuation needs, or its first ones."""

    most: int
    keeps_end: bool

    def ids(self, ids: Sequence[int], added: Sequence[int] = ()) -> Sequence[int]:
        """Token ids, cut.

        Args:
            added: 1 for each token that the tokenizer put around a text; those at both ends are kept, as transformers' `truncation` does.
        """
        if len(ids) <= self.most:
            return ids
        head = next((i for i, each in enumerate(added) if not each), len(added))
        tail = next((i for i, each in enumerate(reversed(added)) if not each), 0)
        room = self.most - head - tail
        if room <= 0:
            head, tail, room = 0, 0, self.most
        text = ids[head : len(ids) - tail]
        return [*ids[:head], *(text[-room:] if self.keeps_end else text[:room]), *ids[len(ids) - tail :]]

    def characters(self, text: str, most: int) -> str:
        """The end of a text that counts, if so many characters are more than the tokens kept can have."""
        return text if len(text) <= most else text[-most:] if self.keeps_end else text[:most]


def ids_of_text(tokenizer: Any, text: str, cut: Cut | None, **settings: Any) -> list[int]:
    """The token ids of a text, cut if asked for."""
    if cut is None:
        return tokenizer(text, **settings).input_ids  # type: ignore[no-any-return]
    encoded = tokenizer(text, return_special_tokens_mask=True, **settings)
    return list(cut.ids(encoded.input_ids, encoded.special_tokens_mask))


def checked_truncation(value: object) -> int | None:
    """`truncate_prompt_tokens`, if it is one.

    Raises:
        TypeError: no whole number. ValueError: neither -1 nor 1 or more.
    """
    allowed = "an int >= 1, or -1 for as many as there is room for; None refuses a prompt that is too long"
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"truncate_prompt_tokens: got {shown(value)} ({type(value).__name__}); allowed: {allowed}")
    if value != ALL_ROOM and value < 1:
        raise ValueError(f"truncate_prompt_tokens: got {shown(value)}; allowed: {allowed}")
    return int(value)
