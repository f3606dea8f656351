"""Triton kernels are compiled in threads of their own before their first launch, which waits for them.

A kernel takes up to two seconds, most of which its assembler works in a process of its own. Launched one after the other in the engine's
thread, the kernels of one layer of experts took 15 s on one core.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime import JITFunction, driver

logger = logging.getLogger("paged_attn")
THREADS = min(8, os.cpu_count() or 1)
_compiled: dict[Hashable, Future[None]] = {}  # all that were ever asked for
_under_way: dict[Any, list[Future[None]]] = {}  # those of a kernel that its next launch waits for
_compiling: ContextVar[tuple[ThreadPoolExecutor, torch.device] | None] = ContextVar("compiling_ahead", default=None)


@dataclass(frozen=True)
class Boxes:
    """An argument of a Gluon kernel that copies boxes of a matrix by TMA; a descriptor holds an address, which fake tensors do not have.

    Attributes:
        tensor: where the matrix begins.
        shape, stride: its rows and columns, and elements from row to row.
        box, layout: rows and columns of a box, and how it lies in shared memory.
    """

    tensor: Tensor
    shape: tuple[int, int]
    stride: int
    box: list[int]
    layout: Any

    def descriptor(self) -> Any:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(self.tensor, list(self.shape), [self.stride, 1], self.box, self.layout)


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Inside, tensors are fake, and `launch` has kernels compiled by other threads and launches none."""
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="compile_ahead")
    with FakeTensorMode():
        token = _compiling.set((threads, device))
        try:
            yield
        finally:
            _compiling.reset(token)
            threads.shutdown(wait=False)  # they end with their work


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """`kernel[grid](*arguments, **constants)`, once what is under way for this kernel is compiled."""
    if (ahead := _compiling.get()) is not None:
        if isinstance(kernel, JITFunction):  # the interpreter has nothing to compile
            _compile(kernel, grid, arguments, constants, *ahead)
        return
    if under_way := _under_way.pop(kernel, None):
        wait(under_way)
        for error in filter(None, (future.exception() for future in under_way)):
            logger.warning("%s could not be compiled ahead, and is compiled now: %s", kernel.__name__, error)
    kernel[grid](*(each.descriptor() if isinstance(each, Boxes) else each for each in arguments), **constants)


def _compile(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], threads: ThreadPoolExecutor,
    device: torch.device,
) -> None:  # fmt: skip
    told = tuple(_specialised(each, parameter.do_not_specialize) for each, parameter in zip(arguments, kernel.params, strict=False))
    key = kernel, device, told, tuple(sorted(constants.items()))
    if key in _compiled:
        return
    given = [argument.dtype if isinstance(argument, Tensor) else argument for argument in arguments]
    index = driver.active.get_current_device() if device.index is None else device.index
    kernel.device_caches[index]  # made here, or two threads would each make one

    def compiled() -> None:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel.warmup(*map(_for_warmup, given), grid=grid, **constants)

    _compiled[key] = threads.submit(compiled)
    _under_way.setdefault(kernel, []).append(_compiled[key])


def _for_warmup(argument: Any) -> Any:
    """Boxes of a tensor that has an address: in the threads that compile, tensors are not fake."""
    if isinstance(argument, Boxes):
        return replace(argument, tensor=torch.empty(8, dtype=argument.tensor.dtype)).descriptor()
    return argument


def _specialised(argument: Any, never: bool) -> Hashable:
    """What Triton looks at: of a tensor its type, of an integer whether it is 1 or a multiple of 16."""
    if isinstance(argument, Tensor):
        return argument.dtype
    if isinstance(argument, Boxes):
        return argument.tensor.dtype, tuple(argument.box)
    if isinstance(argument, int) and not never:
        return argument == 1, argument % 16 == 0
    return type(argument).__name__
