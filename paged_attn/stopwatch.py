"""Measures startup time by named parts, each without the parts inside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar


class Stopwatch:
    """Counts each second for the part that was begun last and has not ended.

    Attributes:
        seconds: by part, in the order in which they first began.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._count()
        self._open.append(name)
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


_running: ContextVar[Stopwatch | None] = ContextVar("paged_attn.stopwatch", default=None)


@contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Seconds of what runs inside, in this thread; what is in no part of its own is of the part `other`."""
    watch = Stopwatch()
    token = _running.set(watch)
    try:
        with watch.part("other"):
            yield watch.seconds
    finally:
        _running.reset(token)


@contextmanager
def part(name: str) -> Iterator[None]:
    """A part of whatever stopwatch runs in this thread; also a decorator."""
    watch = _running.get()
    with nullcontext() if watch is None else watch.part(name):
        yield
