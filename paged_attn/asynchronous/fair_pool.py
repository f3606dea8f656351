"""A thread pool in which clients take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from paged_attn.asynchronous.errors import closed_before_its_end

T = TypeVar("T")


@dataclass(eq=False)
class _Piece:
    work: Callable[[], Any]
    is_long: bool
    result: asyncio.Future[Any]


class FairPool:
    """Runs one piece of work of each client at a time, in the order in which they came; clients take turns. For one event loop at a time.

    Work whose caller was cancelled before it began is dropped.

    Args:
        long_threads: how many of the threads long work may have; the others are left for the rest.
    """

    def __init__(self, name: str, threads: int, long_threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._free, self._free_for_long = threads, long_threads
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None  # the last one that gave work
        self._done: deque[tuple[Hashable, _Piece, Future[Any]]] = deque()  # finished by the threads, but not settled yet
        self._waiting: dict[Hashable, deque[_Piece]] = {}
        self._busy: set[Hashable] = set()
        # Clients whose next piece may begin, whose turn it is first; by whether that piece is long.
        self._ready: dict[bool, OrderedDict[Hashable, None]] = {False: OrderedDict(), True: OrderedDict()}

    async def run(self, client: Hashable, work: Callable[[], T], *, is_long: bool = False) -> T:
        """What `work` returns or raises, from one of the threads. Raises NotServingError: the pool was closed. RuntimeError: another event
        loop that runs waits for work of its own."""
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop) and self._loop.is_running() and (self._busy or self._waiting):
            raise RuntimeError("an AsyncLLM is for one event loop at a time, and another one that runs waits for it; call it from that one")
        self._loop = loop
        self._settle()  # pieces that finished after another loop had ended
        if self._is_closed:
            raise closed_before_its_end()
        piece = _Piece(work, is_long, self._loop.create_future())
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
        """From any thread: what has not begun is refused."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._refuse_all)

    def _refuse_all(self) -> None:
        for pieces in self._waiting.values():
            for piece in pieces:
                if not piece.result.done():
                    piece.result.set_exception(closed_before_its_end())
        self._waiting.clear()
        for ready in self._ready.values():
            ready.clear()

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
        while self._free and not self._is_closed:
            is_long = bool(self._ready[True]) and self._free_for_long > 0
            if not self._ready[is_long]:
                return
            client, _ = self._ready[is_long].popitem(last=False)
            piece = self._waiting[client].popleft()
            if not self._waiting[client]:
                self._leave(client)
            if piece.result.get_loop().is_closed():  # nobody waits for it any more
                self._line_up(client)
                continue
            self._busy.add(client)
            self._free -= 1
            self._free_for_long -= is_long
            try:
                begun = self._threads.submit(piece.work)
            except RuntimeError:  # closed meanwhile
                piece.result.set_exception(closed_before_its_end())
                return
            begun.add_done_callback(partial(self._tell, client, piece))

    def _tell(self, client: Hashable, piece: _Piece, done: Future[Any]) -> None:
        """Called on the piece's thread."""
        self._done.append((client, piece, done))
        with suppress(RuntimeError):  # its loop has ended: the next one settles it
            piece.result.get_loop().call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        while self._done:
            client, piece, done = self._done.popleft()
            self._busy.remove(client)
            self._free += 1
            self._free_for_long += piece.is_long
            if not piece.result.done() and not piece.result.get_loop().is_closed():  # its caller may have left
                if done.cancelled():
                    piece.result.set_exception(closed_before_its_end())
                elif (error := done.exception()) is not None:
                    piece.result.set_exception(error)
                else:
                    piece.result.set_result(done.result())
            self._line_up(client)
        self._begin()
