"""Errors that users can cause; each message says what is wrong, the value, what is allowed, and what to do."""

from __future__ import annotations

import sys


class UnsupportedError(ValueError):
    """A model, layer, call or request that paged_attn cannot run correctly, and therefore refuses to run."""


class ContextError(RuntimeError):
    """A forward context that is entered, used or left in a way that would mix two batches."""


class CaptureError(RuntimeError):
    """A graph that cannot be captured, or whose replay would not compute what the model does."""


def triton_errors() -> tuple[type[Exception], ...]:
    """What Triton raises (of a program without room, of code that it does not compile), if it is in use."""
    triton = sys.modules.get("triton.errors")
    return () if triton is None else (triton.TritonError,)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, after its kind."""
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0]}"
