"""Triton kernels are compiled by other processes before their first launch, which waits for them.

A kernel takes up to two seconds; launched one after the other, those of one layer of experts took 15 s on one core. Processes, as half of
that time is Python's, and as two threads of one process that parse at a time make `ast.parse` fail now and then (Python 3.11).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from subprocess import PIPE
from typing import IO, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime import JITFunction, driver

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.backends.compile_job import Boxes, Job
from paged_attn.backends.compile_worker import DONE

logger = logging.getLogger("paged_attn")
WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))  # Inductor has as many and more
LONG_TO_LOAD = 1.0  # seconds, of a kernel from the disk
COMMAND = (sys.executable, "-m", "paged_attn.backends.compile_worker")
_asked: dict[Hashable, Future[None]] = {}  # all variants of kernels that were ever asked for
_under_way: dict[Any, dict[Hashable, Future[None]]] = {}  # those of a kernel that were not launched yet


Jobs = list[tuple[bytes, "Future[None]"]]  # pickled, with who waits


class _Workers:
    """Processes that compile, up to WORKERS at a time; each ends when there is nothing left for it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[bytes, Future[None]]] = queue.SimpleQueue()
        self._running, self._lock = 0, threading.Lock()

    def compile(self, jobs: Jobs) -> None:
        with self._lock:
            for job in jobs:
                self._jobs.put(job)
            more = min(WORKERS - self._running, len(jobs))
            self._running += more
        for _ in range(more):
            threading.Thread(target=self._serve, name="compile_ahead", daemon=True).start()

    def _serve(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        while not self._ends():
            try:
                with (
                    tempfile.TemporaryFile() as errors,
                    subprocess.Popen(COMMAND, bufsize=0, stdin=PIPE, stdout=PIPE, stderr=errors, env=environment) as worker,
                ):
                    while self._has_compiled(worker, errors):
                        pass
            except OSError as error:  # there can be no such process
                while (job := self._next()) is not None:
                    job[1].set_exception(error)

    def _ends(self) -> bool:
        with self._lock:
            ends = self._jobs.empty()
            self._running -= ends
        return ends

    def _has_compiled(self, worker: subprocess.Popen[bytes], errors: IO[bytes]) -> bool:
        """Have it compile one more; False if there is no other, or it ended."""
        if (job := self._next()) is None:
            return False
        assert worker.stdin is not None and worker.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(job[0])
        if worker.stdout.read(1) == DONE:
            job[1].set_result(None)
            return True
        errors.seek(0)
        job[1].set_exception(RuntimeError(*errors.read().decode(errors="replace").strip().splitlines()[-1:]))
        return False

    def _next(self) -> tuple[bytes, Future[None]] | None:
        try:
            return self._jobs.get_nowait()
        except queue.Empty:
            return None


_workers = _Workers()
_compiling: ContextVar[tuple[torch.device, Jobs] | None] = ContextVar("compiling_ahead", default=None)


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
    job = Job.of(kernel, driver.active.get_current_target(), grid, arguments, constants)
    if device.type == "cuda" and torch.version.hip is None:
        job = replace(job, launcher=True)
    future = _asked[variant] = Future()
    _under_way.setdefault(kernel, {})[variant] = future
    jobs.append((pickle.dumps(job), future))


def _variant(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Hashable:
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
