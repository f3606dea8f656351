"""Whether requests are served, and in words why not."""

from __future__ import annotations

import enum

from paged_attn.server.http.errors import without_backtrace

SHOWN = 500  # characters


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
    """The kind and the first words of an error; all of it is in the log."""
    text = without_backtrace(str(error))
    return f"{type(error).__name__}: {text[:SHOWN]}{'...' * (len(text) > SHOWN)}"
