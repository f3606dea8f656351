"""Limits how many requests are in progress at the same time; the others wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RequestLimit:
    """A limit of requests, which are let in in the order in which they came. For one event loop at a time. `count`: how many there are."""

    def __init__(self, count: int) -> None:
        self.count = self.free = count
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """Inside, so many of them are. Raises ValueError: there will never be so many."""
        if count > self.count:
            raise ValueError(f"n is {count}; at most {self.count} answers run or wait at the same time; ask in several requests")
        if self._waiting or self.free < count:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((count, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    self._waiting.remove((count, turn))
                    self._give(0)  # those behind it may want fewer
                else:  # it came at the same moment
                    self._give(count)
                raise
        else:
            self.free -= count
        try:
            yield
        finally:
            self._give(count)

    def _give(self, count: int) -> None:
        self.free += count
        while self._waiting and self._waiting[0][0] <= self.free:
            wanted, turn = self._waiting[0]
            if turn.done():  # cancelled, and about to leave
                return
            self._waiting.popleft()
            self.free -= wanted
            turn.set_result(None)
