"""Compiles Triton kernels in other processes before their first launch, which waits for them.

A kernel takes up to two seconds; compiled one after the other, those of one layer of experts took 15 s on one core. Processes are used
because half of that time is spent in Python, and because `ast.parse` fails now and then when two threads parse at once (Python 3.11).
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
from paged_attn.attn_ops.triton_launchers import writes_launchers
from paged_attn.backends.compiling.compile_job import Boxes, Job, settle_key
from paged_attn.backends.compiling.compile_pool import Jobs, Workers

logger = logging.getLogger("paged_attn")
LONG_TO_LOAD = 1.0  # seconds; if loading a kernel from disk takes longer, it is logged
_asked: dict[Hashable, Future[None]] = {}  # every kernel variant requested so far
_under_way: dict[Any, dict[Hashable, Future[None]]] = {}  # by kernel: variants not launched yet
_workers = Workers()
_compiling: ContextVar[tuple[torch.device, Jobs, bool] | None] = ContextVar("compiling_ahead", default=None)


def start_workers() -> None:
    """Starts the processes that will compile: they take some seconds to start, and wait a while for kernels."""
    _workers.start()


@contextmanager
def compiling_ahead(device: torch.device, urgent: bool = True) -> Iterator[None]:
    """Inside, new tensors are fake and `launch` launches nothing; afterwards, other processes compile the requested kernels; if that is not
    urgent, with the lowest priority."""
    jobs: Jobs = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        token = _compiling.set((device, jobs, urgent))
        try:
            yield
        finally:
            _compiling.reset(token)
            _workers.compile(jobs)


def on_fakes(batch: Batch, device: torch.device) -> Batch:
    """Inside `compiling_ahead`: the batch with fake tensors on a device in place of its own."""
    real = {field.name: getattr(batch, field.name) for field in fields(batch)}
    fakes: dict[str, Any] = {
        name: torch.empty(value.shape, dtype=value.dtype, device=device) for name, value in real.items() if isinstance(value, Tensor)
    }
    return replace(batch, **fakes)


def is_compiling_ahead() -> bool:
    return _compiling.get() is not None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> Any:
    """`kernel[grid](*arguments, **constants)`, after waiting for that variant if it is being compiled; returns the launch's result."""
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
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], device: torch.device, jobs: Jobs,
    urgent: bool,
) -> None:  # fmt: skip
    if (variant := _variant(kernel, arguments, constants)) in _asked:
        return
    target = driver.active.get_current_target()
    note = note_of(*variant, target)
    future = _asked[variant] = Future()
    if note.exists():
        future.set_result(None)
        return
    job = replace(Job.of(kernel, target, grid, arguments, constants), note=note, urgent=urgent)
    if device.type == "cuda" and torch.version.hip is None:
        job = replace(job, launcher=writes_launchers())
    _under_way.setdefault(kernel, {})[variant] = future
    jobs.append((pickle.dumps(job), future))


def _variant(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, Hashable, Hashable]:
    traits = tuple(_specialised(each, parameter.do_not_specialize) for each, parameter in zip(arguments, kernel.params, strict=False))
    return kernel, traits, tuple(sorted(constants.items()))


def _specialised(argument: Any, never: bool) -> Hashable:
    """The part of an argument that Triton specialises on: a tensor's dtype; whether an integer is 1 or a multiple of 16."""
    if isinstance(argument, Tensor):
        return argument.dtype
    if isinstance(argument, Boxes):
        return argument.tensor.dtype, tuple(argument.box)
    if isinstance(argument, int) and not never:
        return argument == 1, argument % 16 == 0
    return type(argument).__name__


def note_of(kernel: JITFunction, traits: Hashable, constants: Hashable, target: object) -> Path:
    """An empty file in Triton's cache on disk that marks a variant as compiled, so that a second start asks no process for it.

    If it is wrong (another assembler, a deleted part of Triton's cache), the launch compiles the variant.

    Args:
        traits: the parts of the arguments that Triton specialises on; together with `constants`, its `repr` differs for each variant.
        target: the GPU, in Triton's terms.
    """
    of = (kernel.__module__, kernel.__name__, kernel.cache_key, traits, constants, target, triton.__version__, sys.implementation.cache_tag)
    return Path(knobs.cache.dir, "compiled_ahead", sha256(repr(of).encode()).hexdigest())
