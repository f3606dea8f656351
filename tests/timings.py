"""Bounds on seconds, on machines that other work stalls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

TRIES = 3


def assert_in_time(run: Callable[[], Sequence[float]], *allowed: float) -> None:
    """Each of the seconds that `run` gives is below its bound, in one of three runs: what is slow by itself is slow in all of them."""
    seen: list[Sequence[float]] = []
    while len(seen) < TRIES:
        seen.append(run())
        if all(seconds < bound for seconds, bound in zip(seen[-1], allowed, strict=True)):
            return
    raise AssertionError(f"got {seen}; allowed are less than {allowed} seconds")
