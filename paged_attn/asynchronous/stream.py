"""The results of work, delivered piece by piece; a reader that stops ends the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Works = list[Coroutine[Any, Any, T]]


class Stream(Generic[T]):
    """An asynchronous iterator. The work begins with the first `anext`. Leaving an `async for` over it cancels the work at the next turn of
    the event loop, and so does the end of a task that reads; `aclose`, or `async with`, waits for that.

    Args:
        work: given a function that takes each piece, all that is to be done.
    """

    def __init__(self, work: Callable[[Callable[[T], None]], Coroutine[Any, Any, Any]]) -> None:
        self._work: Callable[[Callable[[T], None]], Coroutine[Any, Any, Any]] | None = work
        self._task: asyncio.Task[Any] | None = None
        self._pieces: asyncio.Queue[T | None] = asyncio.Queue()  # None: there are no more

    def __aiter__(self) -> Stream[T]:
        return self

    async def __anext__(self) -> T:
        if self._work is not None:
            pieces = self._pieces  # not `self`: the task must not keep it alive, because it ends when nothing references it
            self._task, self._work = asyncio.ensure_future(self._work(pieces.put_nowait)), None
            self._task.add_done_callback(lambda _: pieces.put_nowait(None))
        if self._task is None:
            raise StopAsyncIteration
        try:
            piece = await self._pieces.get()
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if piece is None:
            task, self._task = self._task, None
            if not task.cancelled():
                task.result()
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """End the work, and wait until it has ended."""
        task, self._task, self._work = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            with suppress(asyncio.CancelledError):
                task.exception()  # otherwise asyncio logs that it was never retrieved

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    def __del__(self) -> None:
        task = getattr(self, "_task", None)
        if task is not None and not task.done():
            with suppress(RuntimeError):  # the loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)


async def together(works: Works[T]) -> list[T]:
    """The results of all of them, which run beside each other; the first error ends the others, and is raised when they have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
