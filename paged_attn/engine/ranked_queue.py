"""A queue ordered by rank; items can be removed or reranked wherever they are."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class RankedQueue(Generic[Item]):
    """The lowest rank is first, and among equals who was put in first. A heap with lazy deletion: O(log n) per change, amortised."""

    _SLACK = 64

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Item]] = []
        self._tickets: dict[Item, int] = {}  # item -> the ticket of its one valid entry
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, item: Item) -> bool:
        return item in self._tickets

    def put(self, item: Item, rank: Any) -> None:
        """Add an item, or rank it again."""
        self._tickets[item] = self._next_ticket
        heapq.heappush(self._heap, (rank, self._next_ticket, item))
        self._next_ticket += 1
        self._drop_stale()

    def discard(self, item: Item) -> None:
        """Forget an item, if it is there."""
        self._tickets.pop(item, None)
        self._drop_stale()

    def first(self) -> Item | None:
        """None in an empty queue."""
        while self._heap and self._tickets.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def _drop_stale(self) -> None:
        if len(self._heap) > 2 * len(self._tickets) + self._SLACK:
            self._heap = [entry for entry in self._heap if self._tickets.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
