"""The requests of a step, one by one or column by column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload


class BatchRequest(NamedTuple):
    """One request's share of a step. (A named tuple: hundreds are made in every step.)

    Attributes:
        tokens: the new token ids, at least one; any sequence of integers, numpy arrays included.
        pages: pages that hold its KV in order (likewise, and `array("i")` is fastest), enough for `num_cached + len(tokens)` tokens.
        num_cached: tokens whose KV is in the pages already.
        num_logits: how many of the last tokens want logits (0 for a chunk that is not the prompt's last).
        state_slot: of its recurrent state, for models that have one.
    """

    tokens: Sequence[int]
    pages: Sequence[int]
    num_cached: int = 0
    num_logits: int = 1
    state_slot: int = 0


class RequestColumns(Sequence[BatchRequest]):
    """BatchRequests kept as their columns, each a sequence with an element per request: to make five lists takes a tenth of the time of
    making hundreds of tuples."""

    __slots__ = ("num_cached", "num_logits", "num_new", "pages", "state_slots", "tokens")

    def __init__(
        self,
        tokens: Sequence[Sequence[int]] = (),
        pages: Sequence[Sequence[int]] = (),
        num_cached: Sequence[int] = (),
        num_logits: Sequence[int] = (),
        state_slots: Sequence[int] = (),
    ) -> None:
        self.tokens, self.pages, self.num_cached, self.num_logits, self.state_slots = tokens, pages, num_cached, num_logits, state_slots
        self.num_new = tuple(map(len, tokens))

    @classmethod
    def of(cls, requests: Sequence[BatchRequest]) -> RequestColumns:
        """`requests` itself, if it is one."""
        return requests if isinstance(requests, RequestColumns) else cls(*zip(*requests, strict=True))

    @property
    def all_decode(self) -> bool:
        """Whether each has one new token after cached ones, and wants its logits."""
        return bool(self.num_new) and max(self.num_new) == 1 == min(self.num_logits) and min(self.num_cached) > 0

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> BatchRequest: ...
    @overload
    def __getitem__(self, index: slice) -> RequestColumns: ...
    def __getitem__(self, index: int | slice) -> BatchRequest | RequestColumns:
        if isinstance(index, slice):
            return RequestColumns.of(list(self)[index])
        return BatchRequest(self.tokens[index], self.pages[index], self.num_cached[index], self.num_logits[index], self.state_slots[index])
