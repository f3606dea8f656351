"""Whether requests are served, and errors for those that were rejected or failed, through no fault of the caller."""

from __future__ import annotations

import enum
from typing import Any

from paged_attn.chat.errors import RequestError

SHOWN = 500  # characters
# What a library prints behind its message.
_BACKTRACES = ("Traceback (most recent call last)", "Exception raised from", "stack backtrace", "Stack backtrace", "frame #", "<state>")


class ServingError(RuntimeError):
    """The engine could not take a request, or could not finish it.

    Attributes:
        code: a word for programs.
        retry_after: seconds after which it may go better; None: nobody knows.
    """

    code = "server_error"
    retry_after: int | None = None


class _CodedError(ServingError):
    def __init__(self, message: str, code: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.code, self.retry_after), self.__dict__


class NotServingError(_CodedError):
    """The engine takes no requests now, or ends with those that it has. `code`: why, such as "loading" or "shutting_down"."""


def closed_before_its_end() -> NotServingError:
    return NotServingError("the engine was closed before the request was complete", "shutting_down")


class EngineDiedError(ServingError):
    """The engine that ran the request is beyond use."""

    code = "dead"


class QueueFullError(ServingError):
    """Too many wait already."""

    code, retry_after = "queue_full", 1


class QueueTimeoutError(ServingError):
    """The request has waited for too long, and did not begin."""

    code, retry_after = "queue_timeout", 5


class StepFailedError(ServingError):
    """The step that ran the request raised; others are not concerned."""

    code = "step_failed"


class RequestFailedError(_CodedError):
    """This request failed alone; `__cause__` says of what. `code` is "bad_logits", or "guide_failed" if what it asked for is at fault."""


TOO_LONG = "context_length_exceeded"  # OpenAI's code, by which clients know that a conversation must be shortened


class PromptError(RequestError):
    """A prompt that cannot be served."""


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
