"""Keys of Triton's cache on disk that are the same in every process.

A kernel's key names the constants of the functions it calls only where those had keys before (Triton 3.6 and 3.7, `_update_hash` in
triton/runtime/jit.py). So it depended on what else a process had launched, and a kernel compiled by one was compiled again by the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from triton.runtime import JITFunction


def settle_key(kernel: object) -> None:
    """Before anything asks for the key of `kernel`, a @triton.jit function: functions get theirs after those that they call."""
    if not isinstance(kernel, JITFunction) or kernel.hash is not None:  # the interpreter's have no key
        return
    for called in _called(kernel):
        settle_key(called)
    kernel.cache_key  # noqa: B018  # kept in `hash`


def _called(kernel: JITFunction) -> Iterator[object]:
    names, known = kernel.fn.__code__.co_names, kernel.fn.__globals__
    modules = [each for name in names if isinstance(each := known.get(name), ModuleType)]
    for name in names:
        yield known.get(name)
        yield from (getattr(module, name, None) for module in modules)
