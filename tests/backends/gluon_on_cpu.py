"""Runs Gluon kernels for Hopper on the CPU: PyTorch in place of registers and shared memory, a thread in place of each warp group.

Triton's interpreter knows no Gluon. Barriers block as on a GPU, shared memory begins as NaN, and threads stop for random times, so that a
wrong index, a barrier that is waited for in the wrong phase, and most races show. Layouts, the order of memory and waits for matrix
products do not: a product is there when it is issued. `test_triton_compile` has the layouts, tests/gpu the real thing.
"""

from __future__ import annotations

import importlib
import random
import sys
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

STUCK_AFTER = 20.0  # seconds
THREADS = 128  # of a producer, each of which arrives when its copies have
_program = threading.local()


class Pointer:
    """Elements of a flat tensor, at offsets of any shape."""

    def __init__(self, memory: torch.Tensor, offset: Any) -> None:
        self.memory, self.offset = memory, torch.as_tensor(offset, dtype=torch.int64)
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + other)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.offset[index])


class Registers(torch.Tensor):
    """A tensor whose type has a layout."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


class Described:
    """What TMA copies boxes of: a matrix, zeros behind its end."""

    def __init__(self, matrix: torch.Tensor, box: tuple[int, int]) -> None:
        self.matrix, self.box, self.layout = matrix, box, None

    def copy(self, at: tuple[Any, Any], barrier: Barrier, tile: Shared) -> None:
        _stop()
        first, column = (int(each) for each in at)
        assert tile.shape == tuple(self.box)
        found = self.matrix[first : first + self.box[0], column : column + self.box[1]]
        value = torch.zeros(tile.shape, dtype=tile.dtype)
        value[: found.shape[0], : found.shape[1]] = found
        tile.store(value)
        barrier.receive(value.numel() * value.element_size())


class Shared:
    """A tile in shared memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def index(self, at: Any) -> Any:
        assert 0 <= int(at) < len(self.tensor)
        return Shared(self.tensor[int(at)])

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.tensor[start : start + length])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.tensor.permute(order))

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.tensor.shape and value.dtype == self.dtype
        self.tensor.copy_(value)

    def load(self, layout: Any) -> torch.Tensor:
        return self.tensor.clone()


class Barrier:
    """An mbarrier: complete when `count` have arrived and all bytes that they expect, then it counts anew."""

    def __init__(self) -> None:
        self.count, self.arrived, self.missing, self.phase, self.changed = 0, 0, 0, 0, threading.Condition()

    def arrive(self, count: int, expected: int = 0) -> None:
        _stop()
        with self.changed:
            self.arrived += count
            self.missing += expected
            assert self.arrived <= self.count, "more arrive than are waited for"
            self._complete()

    def receive(self, count: int) -> None:
        with self.changed:
            self.missing -= count
            assert self.missing >= 0, "more bytes come than are expected"
            self._complete()

    def _complete(self) -> None:
        if self.arrived == self.count and not self.missing:
            self.arrived, self.phase = 0, self.phase + 1
            self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: (self.phase & 1) != int(parity), STUCK_AFTER):
                raise TimeoutError("a barrier was never completed")
        _stop()


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        return self.all[int(at)]


def _stop() -> None:
    if random.random() < 0.3:
        time.sleep(random.random() * 2e-3)


def _where(pointer: Pointer, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = pointer.offset.shape if mask is None else torch.broadcast_shapes(pointer.offset.shape, mask.shape)
    there = torch.ones(shape, dtype=torch.bool) if mask is None else mask.expand(shape)
    return pointer.offset.expand(shape), there


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> torch.Tensor:
    offset, there = _where(pointer, mask)
    found = torch.full(offset.shape, other, dtype=pointer.memory.dtype)
    at = offset[there]
    assert not at.numel() or (int(at.min()) >= 0 and int(at.max()) < pointer.memory.numel())
    found[there] = pointer.memory[at]
    return found


def _store(pointer: Pointer, value: torch.Tensor, mask: Any = None) -> None:
    offset, there = _where(pointer, mask)
    at = offset[there]
    assert not at.numel() or (int(at.min()) >= 0 and int(at.max()) < pointer.memory.numel())
    pointer.memory[at] = torch.as_tensor(value).expand(offset.shape)[there].to(pointer.memory.dtype)


def _copy(tile: Shared, pointer: Pointer, mask: Any = None) -> None:
    tile.store(_load(pointer, mask))


def _mma(a: Shared | torch.Tensor, b: Shared, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> torch.Tensor:
    left = a.tensor if isinstance(a, Shared) else a
    product = left.double() @ b.tensor.double()
    return (product + acc if use_acc else product).float()


def _allocate(dtype: Any, shape: Any, layout: Any) -> Any:
    return Barriers(shape[0]) if dtype is torch.int64 else Shared(torch.full(tuple(shape), float("nan"), dtype=dtype))


def _warp_specialize(parts: Any, warps: Any, registers: Any) -> None:
    def run(program: int, programs: int, function: Any, arguments: Any) -> None:
        _program.id, _program.count = program, programs
        function(*arguments)

    with ThreadPoolExecutor(len(parts)) as threads:
        running = [threads.submit(run, _program.id, _program.count, *each) for each in parts]
        wait(running, return_when=FIRST_EXCEPTION)
        for each in running:
            if each.done():
                each.result()


def _scalar(a: Any, b: Any, function: Any) -> Any:
    return function(torch.as_tensor(a), torch.as_tensor(b))


def _jit(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _jit


def _arange(start: int, end: int, layout: Any = None) -> torch.Tensor:
    return torch.arange(start, end)


def _full(shape: Any, value: float, dtype: torch.dtype, layout: Any = None) -> torch.Tensor:
    return torch.full(tuple(shape), value, dtype=dtype).as_subclass(Registers)


def _zeros(shape: Any, dtype: torch.dtype, layout: Any = None) -> torch.Tensor:
    return _full(shape, 0, dtype)


def _language() -> dict[str, Any]:
    layouts = ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "SwizzledSharedLayout")
    return {
        "constexpr": lambda value: value, "int64": torch.int64, "float32": torch.float32, "arange": _arange, "zeros": _zeros, "full": _full,
        "load": _load, "store": _store, "convert_layout": lambda value, layout: value, "exp2": torch.exp2, "log2": torch.log2,
        "where": lambda c, a, b: torch.where(c, torch.as_tensor(a), torch.as_tensor(b)),
        "minimum": lambda a, b: _scalar(a, b, torch.minimum), "maximum": lambda a, b: _scalar(a, b, torch.maximum),
        "max": lambda x, axis: x.amax(axis), "sum": lambda x, axis: x.sum(axis), "cdiv": lambda a, b: (a + b - 1) // b,
        "static_range": range, "allocate_shared_memory": _allocate, "warp_specialize": _warp_specialize,
        "sigmoid": torch.sigmoid, "erf": torch.erf, "split": lambda x: (x[..., 0], x[..., 1]),
        "program_id": lambda axis: torch.tensor(_program.id), "num_programs": lambda axis: _program.count,
        "thread_barrier": lambda: None, "barrier": lambda: None,
        "NVMMASharedLayout": SimpleNamespace(get_default_for=lambda *_: None), **{name: lambda *_: None for name in layouts},
    }  # fmt: skip


def _modules() -> dict[str, ModuleType]:
    language = _language()
    barrier = SimpleNamespace(
        MBarrierLayout=lambda: None, init=lambda barrier, count: setattr(barrier, "count", count),
        wait=lambda barrier, phase: barrier.wait(phase), arrive=lambda barrier, count=1: barrier.arrive(count),
        expect=lambda barrier, count: barrier.arrive(1, count),
    )  # fmt: skip
    hopper = {
        "tma": SimpleNamespace(async_copy_global_to_shared=lambda boxes, at, barrier, tile: boxes.copy(at, barrier, tile)),
        "fence_async_shared": lambda: None, "mbarrier": barrier, "warpgroup_mma": _mma,
        "warpgroup_mma_wait": lambda pending, deps: deps[0] if len(deps) == 1 else tuple(deps),
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=_copy, mbarrier_arrive=lambda barrier, increment_count: barrier.arrive(THREADS)
        ),
    }  # fmt: skip
    gluon = {"jit": _jit, "constexpr_function": _jit, "language": SimpleNamespace(**language)}
    contents = {
        "": {"jit": _jit, "language": gluon["language"]}, ".language": language, ".experimental": {"gluon": SimpleNamespace(**gluon)},
        ".experimental.gluon": gluon, ".experimental.gluon.language": language, ".experimental.gluon.language.nvidia": {},
        ".experimental.gluon.language.nvidia.hopper": hopper,
    }  # fmt: skip
    modules = {f"triton{name}": ModuleType(f"triton{name}") for name in contents}
    for module, content in zip(modules.values(), contents.values(), strict=True):
        module.__path__ = []
        vars(module).update(content)
    return modules


def on_cpu(module: str, kernel: str, own: tuple[str, ...]) -> Any:
    """The kernel of that module, made anew with all modules whose names begin as `own`: called as `FastKernel` is, it runs here."""
    replaced = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "triton" or name.startswith(own)}
    sys.modules.update(_modules())
    try:
        function = getattr(importlib.import_module(module), kernel)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "triton" or name.startswith(own)]:
            del sys.modules[name]
        sys.modules.update(replaced)

    def launch(key: Any, grid: tuple[int, int], arguments: Any, constants: dict[str, Any], options: Any, device: int) -> None:
        given = [_pointer(each) if isinstance(each, torch.Tensor) else each for each in arguments]
        _program.count = grid[0]
        for _program.id in range(grid[0]):
            function(*given, **constants)

    return launch


def _pointer(tensor: torch.Tensor) -> Pointer:
    """To the tensor's first element, in all of its memory."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return Pointer(memory, tensor.storage_offset())
