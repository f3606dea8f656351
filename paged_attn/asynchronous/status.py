"""Whether requests are served, and if not, why."""

from __future__ import annotations

import enum

SHOWN = 500  # characters
# What a library prints behind its message.
_BACKTRACES = ("Traceback (most recent call last)", "Exception raised from", "stack backtrace", "Stack backtrace", "frame #", "<state>")


class Status(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


WORDS = {
    Status.LOADING: "the model is loading",
    Status.READY: "ready",
    Status.DRAINING: "the engine is shutting down",
    Status.STOPPED: "the engine has shut down",
}


def described(status: Status, error: BaseException | None) -> str:
    """For clients and operators; `error` is what a dead engine died of."""
    return WORDS.get(status) or f"the engine is beyond use and must be restarted: {in_words(error)}"


def in_words(error: BaseException | None) -> str:
    """The kind and the first words of an error; all of it is in the log."""
    text = without_backtrace(str(error))
    return f"{type(error).__name__}: {text[:SHOWN]}{'...' * (len(text) > SHOWN)}"


def without_backtrace(text: str) -> str:
    """What stands before the first line that begins a backtrace."""
    for mark in _BACKTRACES:
        text = text.partition(mark)[0]
    return text.rstrip()
