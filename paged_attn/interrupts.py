"""Holds back Ctrl-C while bookkeeping is updated, until it is consistent.

Python raises KeyboardInterrupt between any two instructions of the main thread. In the middle of handing out a page the page would be
nobody's.
"""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
PATIENCE = 1.0  # seconds after which a second Ctrl-C takes effect at once


class HeldBack:
    """A context, which may be entered again inside: there a SIGINT is noted, and raised where its last exit, or `check`, says so; and at
    once within `let_through`, or where another one came a second before. In threads other than the main one it does nothing, as signals
    never come there, nor where the program itself handles SIGINT otherwise than by a Python function."""

    def __init__(self) -> None:
        self._lets_through: list[bool] = []  # one per entered context
        self._handler: Callable[[int, FrameType | None], object] | None = None  # whose place is taken
        self._noted_at: float | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._lets_through:
            self._noted_at = None
            handler = signal.getsignal(signal.SIGINT)
            if handler == self._note:  # who took it for a handler of the program's has put it back after our exit
                handler = signal.default_int_handler
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
        self._lets_through.append(False)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._lets_through.pop()
        if not self._lets_through and self._handler is not None:
            handler = self._handler
            if signal.getsignal(signal.SIGINT) == self._note:  # otherwise something inside has set another
                signal.signal(signal.SIGINT, handler)
            self._handler = None
            if self._noted_at is not None:
                handler(signal.SIGINT, None)

    def check(self) -> None:
        """Inside, where the books are right: raise what was noted."""
        if self._noted_at is not None and self._handler is not None and threading.current_thread() is threading.main_thread():
            self._noted_at = None
            self._handler(signal.SIGINT, None)

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Inside, a SIGINT is raised at once: what runs there may take long, and its caller undoes it after any exception."""
        if not self._lets_through or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._lets_through.append(True)
        try:
            self.check()
            yield
        finally:
            self._lets_through.pop()

    def _note(self, _: int, frame: FrameType | None) -> None:
        now, before = time.monotonic(), self._noted_at
        if self._handler is None:
            signal.default_int_handler(signal.SIGINT, frame)
        elif self._lets_through[-1:] == [True] or (before is not None and now - before > PATIENCE):
            self._noted_at = None
            self._handler(signal.SIGINT, frame)
        elif before is None:
            self._noted_at = now


held_back = HeldBack()


def uninterrupted(function: F) -> F:
    """The function with all of a call within `held_back`."""

    @functools.wraps(function)
    def held(*args: Any, **given: Any) -> Any:
        with held_back:
            return function(*args, **given)

    return held  # type: ignore[return-value]
