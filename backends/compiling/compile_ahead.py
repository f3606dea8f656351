"""Compiles Triton kernels in other processes before their first launch, which waits for them.

A kernel takes up to two seconds; launched one after the other, those of one layer of experts took 15 s on one core. Processes, as half of
that time is Python's, and as two threads of one process that parse at a time make `ast.parse` fail now and then (Python 3.11).
"""

from __future__ import annotations

import logging
import pickle
import sys
import time
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs
from triton.runtime import JITFunction, driver

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.backends.compiling.compile_job import Boxes, Job, settle_key
from paged_attn.backends.compiling.compile_pool import Jobs, Workers

logger = logging.getLogger("paged_attn")
LONG_TO_LOAD = 1.0  # seconds to load a kernel from disk, above which it is logged
_asked: dict[Hashable, Future[None]] = {}  # every kernel variant requested so far
_under_way: dict[Any, dict[Hashable, Future[None]]] = {}  # those of a kernel that were not launched yet
_workers = Workers()
_compiling: ContextVar[tuple[torch.device, Jobs] | None] = ContextVar("compiling_ahead", default=None)


def start_workers() -> None:
    """The processes that will compile: they take some seconds to begin, and wait for kernels a while."""
    _workers.start()


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Inside, new tensors are fake, and `launch` launches nothing; what it was asked for is compiled by other processes afterwards."""
    jobs: Jobs = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        token = _compiling.set((device, jobs))
        try:
            yield
        finally:
            _compiling.reset(token)
            _workers.compile(jobs)


def on_fakes(batch: Batch, device: torch.device) -> Batch:
    """Inside `compiling_ahead`: with fake tensors on a device in the places of its own."""
    real = {field.name: getattr(batch, field.name) for field in fields(batch)}
    fakes: dict[str, Any] = {
        name: torch.empty(value.shape, dtype=value.dtype, device=device) for name, value in real.items() if isinstance(value, Tensor)
    }
    return replace(batch, **fakes)


def is_compiling_ahead() -> bool:
    return _compiling.get() is not None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> Any:
    """`kernel[grid](*arguments, **constants)`, once that variant is compiled, if it is under way; returns what that does."""
    settle_key(kernel)
    if (ahead := _compiling.get()) is not None:
        if isinstance(kernel, JITFunction):  # the interpreter has nothing to compile
            _compile(kernel, grid, arguments, constants, *ahead)
        return None
    started = None
    if under_way := _under_way.get(kernel):
        if (future := under_way.pop(_variant(kernel, arguments, constants), None)) is not None:
            if (error := future.exception()) is not None:  # waits
                logger.warning("%s could not be compiled ahead, and is compiled now: %s", kernel.__name__, error)
            started = time.perf_counter()
        elif all(each.done() for each in under_way.values()):
            _under_way.pop(kernel, None)
    result = kernel[grid](*(each.descriptor() if isinstance(each, Boxes) else each for each in arguments), **constants)
    if started is not None and (seconds := time.perf_counter() - started) > LONG_TO_LOAD:
        logger.info("%s was compiled ahead, and takes %.1f s to launch: perhaps its key differs here", kernel.__name__, seconds)
    return result


def _compile(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], device: torch.device, jobs: Jobs
) -> None:
    if (variant := _variant(kernel, arguments, constants)) in _asked:
        return
    target = driver.active.get_current_target()
    note = note_of(*variant, target)
    future = _asked[variant] = Future()
    if note.exists():
        future.set_result(None)
        return
    job = replace(Job.of(kernel, target, grid, arguments, constants), note=note)
    if device.type == "cuda" and torch.version.hip is None:
        job = replace(job, launcher=True)
    _under_way.setdefault(kernel, {})[variant] = future
    jobs.append((pickle.dumps(job), future))


def _variant(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, Hashable, Hashable]:
    told = tuple(_specialised(each, parameter.do_not_specialize) for each, parameter in zip(arguments, kernel.params, strict=False))
    return kernel, told, tuple(sorted(constants.items()))


def _specialised(argument: Any, never: bool) -> Hashable:
    """What Triton looks at: of a tensor its type, of an integer whether it is 1 or a multiple of 16."""
    if isinstance(argument, Tensor):
        return argument.dtype
    if isinstance(argument, Boxes):
        return argument.tensor.dtype, tuple(argument.box)
    if isinstance(argument, int) and not never:
        return argument == 1, argument % 16 == 0
    return type(argument).__name__


def note_of(kernel: JITFunction, told: Hashable, constants: Hashable, target: object) -> Path:
    """The empty file in Triton's cache on disk that says that a variant lies there, so that a second start asks no process for it.

    Where it is wrong (another assembler, a part of Triton's cache that is gone), the launch compiles the variant.

    Args:
        told: what Triton looks at of the arguments; with `constants`, whatever makes another variant has another `repr`.
        target: the GPU, as Triton knows it.
    """
    of = (kernel.__module__, kernel.__name__, kernel.cache_key, told, constants, target, triton.__version__, sys.implementation.cache_tag)
    return Path(knobs.cache.dir, "compiled_ahead", sha256(repr(of).encode()).hexdigest())
