"""Runs a model author's code; its errors are findings about the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from paged_attn.attn_ops.errors import UnsupportedError

MODEL_ERRORS = (RuntimeError, ValueError, LookupError, ArithmeticError, AssertionError, AttributeError, TypeError, NameError)


@contextmanager
def model_code(finding: Callable[[str], Exception]) -> Iterator[None]:
    """Inside, what the code raises becomes `finding("TypeError: ...")`.

    A refusal stays what it is, and so does a device without room: that is not a property of the model, and would be remembered as one.
    """
    try:
        yield
    except (UnsupportedError, torch.OutOfMemoryError):
        raise
    except MODEL_ERRORS as error:
        raise finding(f"{type(error).__name__}: {error}") from error
