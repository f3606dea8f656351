"""Temporarily replaces the forward of a module or of any other object that has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced_forward(module: object, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, `module` computes `forward`; afterwards its own instance attribute is back, if it had one, and else its class's method."""
    missing = object()
    before = vars(module).get("forward", missing)
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if before is missing:
            vars(module).pop("forward", None)
        else:
            vars(module)["forward"] = before
