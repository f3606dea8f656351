"""Numbers from the host to a device: one array, or several of integers in one buffer, filled with numpy and moved in one copy."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.gpu_kernel import GpuKernel

FETCH_KERNEL = GpuKernel()  # device [words] int64, pinned memory [words] -> device, once it has been filled
ALIGNMENT = 128  # bytes, so that any field suits kernels that load 16 bytes at a time or through TMA
_WORDS = ALIGNMENT // 8
_PLAIN = frozenset({list, tuple, bytes, range})
_ARRAYS, _TYPECODE = frozenset({array}), attrgetter("typecode")


class IntBuffer:
    """Device memory [size] int64 that `PackedInts` are copied to, each over the one before.

    The views of the latest layouts are cached, because making a step's views takes longer than copying its data.
    """

    KEPT = 256

    def __init__(self, size: int, device: torch.device | str) -> None:
        with torch.inference_mode(False):  # outside inference mode, tensors made in it cannot be written
            self.ints = torch.zeros(size, dtype=torch.int64, device=device)
        self._views: dict[_Layout, tuple[Tensor, list[Tensor]]] = {}

    def views(self, layout: _Layout) -> tuple[Tensor, list[Tensor]]:
        """The start [layout.size], and every field as a tensor."""
        if layout not in self._views:
            if len(self._views) == self.KEPT:
                self._views.clear()
            with torch.inference_mode(False):
                self._views[layout] = self.ints[: layout.size], layout.views(self.ints, torch.int32)
        return self._views[layout]


class PackedInts:
    """Zeroed int64 fields and int32 fields, pinned if the device is a GPU, so that copying does not wait.

    Fill `host`, numpy arrays [size] in the order of the sizes, int64 first; then call `to_device` once, or bring `memory` there otherwise.

    Attributes:
        memory: all fields [words] int64, on the host.

    Args:
        int64, int32: size of each field; every field starts at a multiple of ALIGNMENT bytes.
        device: where `to_device` allocates a buffer; unused with `into`.
        into: a buffer of at least `words` integers, whose beginning gets the fields; its device is used.
        room: the least number of integers reserved for an int32 field, so that smaller sizes do not move the next one.
    """

    def __init__(
        self, int64: Sequence[int], int32: Sequence[int], device: torch.device | str = "cpu", into: IntBuffer | None = None, room: int = 0
    ) -> None:
        self._device, self._into = torch.device(device) if into is None else into.ints.device, into
        self._layout = _layout(tuple(int64), tuple(int32), room)
        self.memory = torch.empty(self._layout.size, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        memory = self.memory.numpy()
        memory.fill(0)  # torch.zeros wakes threads for a large one, which then spin for milliseconds beside ours
        self.host: list[NDArray[Any]] = self._layout.views(memory, np.int32)

    def to_device(self) -> list[Tensor]:
        """Every field as a tensor [size]: views of one buffer, copied without waiting."""
        if self._into is not None:
            start, fields = self._into.views(self._layout)
            _fill(start, self.memory)
            return fields
        return self._layout.views(_on_device(self.memory, self._device), torch.int32)

    def destination(self) -> tuple[Tensor, list[Tensor]]:
        """Where `memory` and every field of it belong in `into`."""
        assert self._into is not None
        return self._into.views(self._layout)

    def start_of(self, field: int) -> int:
        """Where an int32 field (by index) begins in `memory`, counted in int32."""
        start: int = self._layout.narrow[field].start
        return start


def words(int64: Sequence[int], int32: Sequence[int], room: int = 0) -> int:
    """The size of a `PackedInts` buffer in int64."""
    return _layout(tuple(int64), tuple(int32), room).size


@dataclass(frozen=True, eq=False)
class _Layout:
    """The fields' slices, in integers of their own width, and the buffer's size in int64."""

    wide: list[slice]
    narrow: list[slice]
    size: int

    def views(self, memory: Any, int32: Any) -> list[Any]:
        """The fields of int64 memory, an array or a tensor; `int32` is its library's type."""
        halved = memory.view(int32)
        return [*[memory[span] for span in self.wide], *[halved[span] for span in self.narrow]]


@lru_cache(maxsize=4096)
def _layout(int64: tuple[int, ...], int32: tuple[int, ...], room: int) -> _Layout:
    wide, end = _spans(int64, 0, _WORDS, 0)
    narrow, halves = _spans(int32, 2 * end, 2 * _WORDS, room)
    return _Layout(wide, narrow, halves // 2)


def _spans(sizes: Sequence[int], start: int, unit: int, room: int) -> tuple[list[slice], int]:
    """Slices of fields that begin at multiples of `unit` from `start` on, and where the last field's room ends."""
    spans = []
    for size in sizes:
        spans.append(slice(start, start + size))
        size = max(size, room)
        start += size + -size % unit
    return spans, start


def write_joined(target: NDArray[Any], rows: Sequence[Sequence[int]], what: str) -> None:
    """Write rows of integers (lists, tuples, ranges, bytes, arrays) one after another to `target`, int32 or int64 [sum of their lengths].

    Raises:
        ValueError: something is not an integer or does not fit; the message names its row.
    """
    try:
        if _PLAIN.issuperset(map(type, rows)):
            _packer(len(target), target.dtype.char, len(target)).pack_into(target.data, 0, *chain.from_iterable(rows))
        else:
            np.concatenate([_array(row, target.dtype) for row in rows], out=target)
    except struct.error:
        raise ValueError(_refusal(rows, target.dtype, what)) from None


def write_table(target: NDArray[Any], rows: Sequence[Sequence[int]], what: str) -> None:
    """Write rows of integers to the rows of `target` [rows, longest], contiguous; the rest of each row becomes 0.

    Raises:
        ValueError: see `write_joined`.
    """
    try:
        lengths, code, room = list(map(len, rows)), target.dtype.char, target.shape[1]
        if _ARRAYS.issuperset(map(type, rows)) and {code}.issuperset(map(_TYPECODE, rows)):
            zeros = memoryview(bytes(room * target.itemsize))
            rest = {length: zeros[length * target.itemsize :] for length in set(lengths)}
            pieces: Iterable[Any] = chain.from_iterable(zip(rows, map(rest.__getitem__, lengths), strict=True))
            target[:] = np.frombuffer(b"".join(pieces), target.dtype).reshape(target.shape)
        elif _PLAIN.issuperset(map(type, rows)):  # faster than numpy, which takes 20 ns for each int in a list
            pack = {length: _packer(length, code, room).pack for length in set(lengths)}
            packed = b"".join([pack[length](*row) for length, row in zip(lengths, rows, strict=True)])
            target[:] = np.frombuffer(packed, target.dtype).reshape(target.shape)
        else:
            filled = np.arange(target.shape[1]) < np.array(lengths)[:, None]
            target[filled] = np.concatenate([_array(row, target.dtype) for row in rows])
            target[~filled] = 0
    except struct.error:
        raise ValueError(_refusal(rows, target.dtype, what)) from None


@lru_cache(maxsize=4096)
def _packer(count: int, code: str, room: int) -> struct.Struct:
    """`count` integers, then `room - count` zeros."""
    return struct.Struct(f"{count}{code}{(room - count) * struct.calcsize(code)}x")


def _array(row: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    if isinstance(row, np.ndarray) and row.dtype == dtype and row.ndim == 1:
        return row
    array = np.asarray(row)
    if array.ndim == 1 and np.can_cast(array.dtype, dtype):
        return array
    return np.frombuffer(_packer(len(row), dtype.char, len(row)).pack(*array.tolist()), dtype)


def _refusal(rows: Sequence[Sequence[int]], dtype: np.dtype[Any], what: str) -> str:
    for index, row in enumerate(rows):
        for value in row:
            try:
                struct.pack(dtype.char, value)
            except (struct.error, TypeError):
                return f"the {what} of request {index} must be integers of {8 * dtype.itemsize} bits; got {value!r}"
    raise AssertionError("a row was refused although all its values fit")


def copy_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Arrays of int64 or bool, of one or two dimensions, as tensors of the same shapes on a device: views of one buffer, copied at once,
    for which the host does not wait. Each begins at a multiple of ALIGNMENT bytes."""
    starts, end = [], 0
    for each in arrays:
        starts.append(end)
        end += each.nbytes + -each.nbytes % ALIGNMENT
    memory = np.empty(max(end // 8, 1), np.int64)  # torch views no empty memory as bool
    views: dict[np.dtype[Any], NDArray[Any]] = {np.dtype(kind): memory.view(kind) for kind in (np.int64, np.bool_)}
    offsets = [start // each.itemsize for each, start in zip(arrays, starts, strict=True)]
    for each, offset in zip(arrays, offsets, strict=True):
        views[each.dtype][offset : offset + each.size] = each.ravel()
    buffer = copy_to_device(memory, device)
    tensors = {np.dtype(np.int64): buffer, np.dtype(np.bool_): buffer.view(torch.bool)}
    return [
        tensors[each.dtype].as_strided(each.shape, (1,) if each.ndim == 1 else (each.shape[1], 1), offset)
        for each, offset in zip(arrays, offsets, strict=True)
    ]


def copy_to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of these numbers on the device; the host does not wait for the copy.

    A GPU reads pinned memory by itself. For unpinned memory, CUDA waits until the stream is empty if it copies more than 64 KB (such as a
    prompt's rows).
    """
    host = torch.from_numpy(numbers)
    return _on_device(pinned(host) if device.type == "cuda" else host, device)


def _on_device(host: Tensor, device: torch.device) -> Tensor:
    """The tensor itself on the CPU."""
    return host if device.type == "cpu" else _fill(torch.empty_like(host, device=device), host)


def _fill(tensor: Tensor, host: Tensor) -> Tensor:
    """`tensor`, on any device, with the numbers of `host`, for which nobody waits: read by a kernel, or copied."""
    if host.dtype != torch.int64 or FETCH_KERNEL(tensor, host) is None:
        tensor.copy_(host, non_blocking=True)
    return tensor


def pinned(host: Tensor) -> Tensor:
    """A pinned copy; unlike `pin_memory`, this also works for fake tensors."""
    return torch.empty_like(host, pin_memory=True).copy_(host)
