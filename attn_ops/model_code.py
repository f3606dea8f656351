"""Runs a model author's code; its errors are findings about the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from paged_attn.attn_ops.errors import UnsupportedError

MODEL_ERRORS = (RuntimeError, ValueError, LookupError, ArithmeticError, AssertionError, AttributeError, TypeError, NameError)


@contextmanager
def model_code(finding: Callable[[str], Exception]) -> Iterator[None]:
    """Inside, an exception of the model's code is raised as `finding("TypeError: ...")`.

    Refusals pass through unchanged. So do out-of-memory errors, which say nothing about the model but would be remembered as if they did.
    """
    try:
        yield
    except (UnsupportedError, torch.OutOfMemoryError):
        raise
    except MODEL_ERRORS as error:
        raise finding(f"{type(error).__name__}: {error}") from error


@contextmanager
def model_may_fail() -> Iterator[list[Exception]]:
    """Inside, an exception of the model's code ends the block and is put into the list; out-of-memory errors pass, as in `model_code`."""
    failures: list[Exception] = []
    try:
        yield failures
    except torch.OutOfMemoryError:
        raise
    except MODEL_ERRORS as error:
        failures.append(error)
