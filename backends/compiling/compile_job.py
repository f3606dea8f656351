"""One variant of a Triton kernel, to be compiled by another process, which needs no GPU."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.runtime import JITFunction

from paged_attn.attn_ops.triton_launchers import build_launcher

LOWEST = 19  # of processes


@dataclass(frozen=True)
class Boxes:
    """An argument of a Gluon kernel that copies boxes of a matrix by TMA. A descriptor has an address, which fake tensors lack.

    Attributes:
        tensor: the start of the matrix; in a `Job`, its dtype.
        shape, stride: its rows and columns, and elements from row to row.
        box, layout: rows and columns of a box, and its layout in shared memory.
    """

    tensor: Any
    shape: tuple[int, int]
    stride: int
    box: list[int]
    layout: Any

    def descriptor(self) -> Any:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(self.tensor, list(self.shape), [self.stride, 1], self.box, self.layout)


@dataclass(frozen=True)
class CompilingDriver:
    """The part of Triton's driver that compiling for a GPU needs."""

    target: Any

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


@dataclass(frozen=True)
class Job:
    """A variant of a kernel.

    Attributes:
        module, name: where the @triton.jit function is.
        target: the GPU, in Triton's terms.
        arguments: the launch's, with dtypes in place of tensors.
        note: the file to create when it is done; see `compile_ahead.note_of`.
        launcher: also build the launcher.
        urgent: if not, the process takes the lowest priority, for good.
    """

    module: str
    name: str
    target: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    note: Path | None = None
    launcher: bool = False
    urgent: bool = True

    @classmethod
    def of(cls, kernel: Any, target: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Job:
        return cls(kernel.__module__, kernel.__name__, target, grid, tuple(map(_without_memory, arguments)), constants)

    def compile(self) -> Any:
        """Compiles into Triton's cache on disk; returns the compiled kernel, which must not be launched."""
        from triton.runtime import driver

        if not self.urgent:
            os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
        driver.set_active(CompilingDriver(self.target))
        kernel = getattr(importlib.import_module(self.module), self.name)
        settle_key(kernel)
        compiled = kernel.warmup(*map(_for_warmup, self.arguments), grid=self.grid, **self.constants)
        if self.launcher:
            build_launcher(compiled)
        if self.note is not None:
            self.note.parent.mkdir(parents=True, exist_ok=True)
            self.note.touch()
        return compiled


def _without_memory(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype
    return replace(argument, tensor=argument.tensor.dtype) if isinstance(argument, Boxes) else argument


def _for_warmup(argument: Any) -> Any:
    """The argument for `warmup`; a descriptor is made for a small tensor."""
    return replace(argument, tensor=torch.empty(8, dtype=argument.tensor)).descriptor() if isinstance(argument, Boxes) else argument


def settle_key(kernel: object) -> None:
    """Gives a @triton.jit function its key after those of the functions that it calls; must run before anything else asks for the key.

    Triton 3.6 and 3.7 (`_update_hash` in triton/runtime/jit.py) include the constants of called functions only if these already have keys.
    So a key depended on the process's earlier launches, and one process compiled again what another had compiled.
    """
    if not isinstance(kernel, JITFunction) or kernel.hash is not None:  # functions of the interpreter have no key
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
