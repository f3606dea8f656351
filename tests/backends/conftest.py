"""Triton's interpreter puts its functions into Triton's language before a launch, and again before every call of a device function.

Here it does so once a launch: what it finds at later calls is what it has put there, after a search that took a third of these tests' time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch


def once_a_launch(patch: Callable[[Any], Any], languages: Callable[[Any], frozenset[str]]) -> Callable[[Any], Any]:
    """The interpreter's `_patch_lang`, but for languages that are patched until the launch under way restores them."""
    patched: set[str] = set()

    class Scope:
        def __init__(self, scope: Any) -> None:
            self.scope = scope

        def restore(self) -> None:
            self.scope.restore()
            patched.clear()

    def patched_once(fn: Any) -> Any:
        if patched and languages(fn) <= patched:
            return contextlib.nullcontext()  # a call inside: nobody restores it
        patched.update(languages(fn))
        return Scope(patch(fn))

    return patched_once


if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    import triton.language as tl
    from triton.runtime import interpreter

    @functools.cache
    def languages_of(fn: Any) -> frozenset[str]:
        return frozenset(value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core)

    interpreter._patch_lang = once_a_launch(interpreter._patch_lang, languages_of)


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products in float64, rounded once: numpy's of float32 depend on how many rows there are, on some processors."""
    if torch.cuda.is_available():
        return
    create_dot = interpreter.InterpreterBuilder.create_dot

    def exact(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if a.data.dtype != "float32" or b.data.dtype != "float32":
            return create_dot(self, a, b, d, *precision)
        product = a.data.astype("float64") @ b.data.astype("float64")
        return interpreter.TensorHandle(product.astype("float32") + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", exact)
