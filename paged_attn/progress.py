"""Progress bars on stderr: on a terminal, or on request. tqdm is imported when the first one is drawn."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_asked: ContextVar[bool | None] = ContextVar("paged_attn_progress", default=None)


@contextmanager
def progress(show: bool | None) -> Iterator[None]:
    """Whether bars made inside, in this thread, are drawn: None is on a terminal only. Raises TypeError for anything else."""
    if show is not None and not isinstance(show, bool):
        raise TypeError(f"progress is {show!r}; allowed are True, False, and None (on a terminal only)")
    token = _asked.set(show)
    try:
        yield
    finally:
        _asked.reset(token)


def asked() -> bool | None:
    """What `progress` was told."""
    return _asked.get()


def draws() -> bool:
    """Whether a bar made here is drawn. Making one takes 30 us even if it is not."""
    show = asked()
    return sys.stderr.isatty() if show is None else show


def bar(iterable: Iterable[Any] | None = None, *, what: str, unit: str, total: int | None = None, delay: float = 0.0) -> Any:
    """A tqdm bar, which counts iterations or what `update` is given; it vanishes when it is done.

    Args:
        delay: seconds before it is drawn, so that short work draws none.
    """
    from tqdm import tqdm

    show = asked()
    disable = None if show is None else not show  # tqdm's None: unless stderr is a terminal
    return tqdm(iterable, total=total, desc=what, unit=unit, disable=disable, leave=False, delay=delay, dynamic_ncols=True)
