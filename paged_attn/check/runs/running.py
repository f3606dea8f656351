"""Calling a graph whose code may depend on the length of the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code


@contextmanager
def must_run(what: str, on: str) -> Iterator[None]:
    """A graph that breaks at another length than the traced one was specialised to that length."""
    failed = f"self-check failed: {what} can not run {on}"
    with model_code(lambda why: UnsupportedError(f"{failed}: {why}. The model's code depends on the length.")):
        yield
