"""Whether requests are served, and in words why not."""

from __future__ import annotations

import enum


class Status(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


WORDS = {
    Status.LOADING: "the model is loading",
    Status.READY: "ready",
    Status.DRAINING: "the server is shutting down",
    Status.STOPPED: "the server has shut down",
}


def described(status: Status, error: BaseException | None) -> str:
    """For clients and operators; `error` is what a dead engine died of."""
    return WORDS.get(status) or f"the engine is beyond use and the server must be restarted: {in_words(error)}"


def in_words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"
