"""Threads that work for many clients, who take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Piece:
    work: Callable[[], Any]
    is_long: bool
    result: asyncio.Future[Any]


class FairPool:
    """Of each client one piece of work runs at a time, in the order in which they came; clients take turns. For one event loop.

    Work whose caller was cancelled before it began is dropped.

    Args:
        long_threads: how many of the threads long work may have; the others are left for the rest.
    """

    def __init__(self, name: str, threads: int, long_threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._free, self._free_for_long = threads, long_threads
        self._waiting: dict[Hashable, deque[_Piece]] = {}
        self._busy: set[Hashable] = set()
        # Clients whose next piece may begin, whose turn it is first; by whether that piece is long.
        self._ready: dict[bool, OrderedDict[Hashable, None]] = {False: OrderedDict(), True: OrderedDict()}

    async def run(self, client: Hashable, work: Callable[[], T], *, is_long: bool = False) -> T:
        """What `work` returns or raises, from one of the threads."""
        piece = _Piece(work, is_long, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(client, deque()).append(piece)
        self._line_up(client)
        self._begin()
        try:
            result: T = await piece.result
            return result
        finally:
            if piece.result.cancelled():
                self._forget(client, piece)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _line_up(self, client: Hashable) -> None:
        if client not in self._busy and client in self._waiting:
            is_long = self._waiting[client][0].is_long
            self._ready[not is_long].pop(client, None)
            self._ready[is_long].setdefault(client)

    def _forget(self, client: Hashable, piece: _Piece) -> None:
        """Drop a piece, unless it has begun."""
        waiting = self._waiting.get(client)
        if waiting is None or piece not in waiting:
            return
        waiting.remove(piece)
        if not waiting:
            self._leave(client)
        self._line_up(client)
        self._begin()

    def _leave(self, client: Hashable) -> None:
        del self._waiting[client]
        for ready in self._ready.values():
            ready.pop(client, None)

    def _begin(self) -> None:
        while self._free:
            is_long = bool(self._ready[True]) and self._free_for_long > 0
            if not self._ready[is_long]:
                return
            client, _ = self._ready[is_long].popitem(last=False)
            piece = self._waiting[client].popleft()
            if not self._waiting[client]:
                self._leave(client)
            self._busy.add(client)
            self._free -= 1
            self._free_for_long -= is_long
            self._threads.submit(piece.work).add_done_callback(partial(self._tell, client, piece))

    def _tell(self, client: Hashable, piece: _Piece, done: Future[Any]) -> None:
        """Called on the piece's thread."""
        if not (loop := piece.result.get_loop()).is_closed():  # after a forced end nobody is left to tell
            loop.call_soon_threadsafe(self._ended, client, piece, done)

    def _ended(self, client: Hashable, piece: _Piece, done: Future[Any]) -> None:
        self._busy.remove(client)
        self._free += 1
        self._free_for_long += piece.is_long
        if not piece.result.done():  # its caller may have left
            if done.cancelled():  # the pool was closed
                piece.result.cancel()
            elif (error := done.exception()) is not None:
                piece.result.set_exception(error)
            else:
                piece.result.set_result(done.result())
        self._line_up(client)
        self._begin()
