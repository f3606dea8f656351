"""Errors that users can cause; each message says what is wrong, the value, what is allowed, and what to do."""

from __future__ import annotations

import sys


class UnsupportedError(ValueError):
    """A model, layer, call or request that paged_attn refuses because it cannot run it correctly."""


class UnsupportedModule(UnsupportedError):
    """One module of a model is refused as it is; it may run unchanged, on all tokens of a request.

    Attributes:
        module: its path; "" for what stands outside any module.
    """

    def __init__(self, module: str, words: str) -> None:
        self.module = module
        super().__init__(words)


class ContextError(RuntimeError):
    """A forward context was entered, used or left in a way that would mix two batches."""


class CaptureError(RuntimeError):
    """A graph cannot be captured, or its replay would not compute what the model does."""


def triton_errors() -> tuple[type[Exception], ...]:
    """What Triton raises if a program needs too many resources or its code does not compile; empty if Triton is not in use."""
    triton = sys.modules.get("triton.errors")
    return () if triton is None else (triton.TritonError,)


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0]}"
