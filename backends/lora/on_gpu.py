"""Launches the kernels of `paged_attn::lora` and `lora_up`. Launches do not depend on which rows have which adapter, so captured graphs can
replay any assignment."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.lora.kernels import expand_kernel, shrink_kernel
from paged_attn.backends.lora.up_kernel import up_kernel
from paged_attn.backends.machine import machine_of
from paged_attn.backends.unit_stride import is_unit_last, unit_last

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROGRAMS = 1024  # fewest programs of the first kernel, so that enough of them read even for few rows
FEW_ROWS = 128  # up to this many rows, each adapter has its own programs
NEVER = 2**31 - 1
BLOCK_BYTES = 1 << 16  # a block of factors in shared memory
PRODUCTS = 1024  # products of the first kernel that programs may share
LONGEST_PRODUCT = 128  # summed ranks of all adapters that a program of the third kernel processes at a time
_fast_shrink, _fast_expand, _fast_up = FastKernel(shrink_kernel), FastKernel(expand_kernel), FastKernel(up_kernel)


@dataclass(frozen=True)
class LoraTiling:
    """How a launch divides its work; sizes are powers of 2.

    Attributes:
        rows, columns: of x that a program reads at a time, at least 16.
        outputs: of a program of the second kernel, at least 16.
        splits: most programs over which the columns of a sum are divided.
        each: whether each adapter has programs of its own.
    """

    rows: int
    columns: int = 128
    outputs: int = 128
    splits: int = 16
    each: bool = True

    @classmethod
    @functools.lru_cache(1024)  # called by every layer
    def of(cls, count: int, rank: int, itemsize: int, shared_bytes: int = 0) -> LoraTiling:
        """For `count` rows, with blocks that fit into a program's shared memory: `itemsize` of a factor, and float32 for sums.
        `shared_bytes`: see `Machine`."""
        if count == 1:
            found = cls(rows=16, each=False)
        elif count <= 16:
            found = cls(rows=16, columns=256)
        elif count <= FEW_ROWS:
            found = cls(rows=min(triton.next_power_of_2(count), 64), splits=8)
        else:
            found = cls(rows=64, outputs=64, each=False)
        sums = BLOCK_BYTES // 4 // _block(rank)
        columns = BLOCK_BYTES // itemsize // _block(rank)
        rows, outputs = (max(min(each, sums), 16) for each in (found.rows, found.outputs))
        columns = max(min(found.columns, columns), 16)
        at_once = max(stages_of(rank) - 1, 1) * itemsize * (_block(rank) + rows)  # bytes per column
        while shared_bytes and columns > 16 and at_once * columns > shared_bytes:
            columns //= 2
        return replace(found, rows=rows, outputs=outputs, columns=columns)


@dataclass(frozen=True)
class UpTiling:
    """How a launch of `up_kernel` divides its work: rows and outputs of a program, powers of 2 and at least 16, and whether it processes
    all adapters together."""

    rows: int
    outputs: int
    together: bool

    @classmethod
    def of(cls, count: int) -> UpTiling:
        """The fastest of a dozen, on an H200, beside the products of a layer with 4,096 to 28,672 outputs."""
        if count == 1:
            return cls(16, 64, False)
        if count <= FEW_ROWS:
            return cls(min(max(triton.next_power_of_2(count), 16), 64), 32, True)
        return cls(32, 128, False)


def lora_on_gpu(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int], tiling: LoraTiling | None = None
) -> Tensor | None:
    """Computes the op; None for a dtype without a kernel of ours."""
    if y.dtype not in DTYPES or len({y.dtype, x.dtype, a.dtype, b.dtype}) != 1:
        return None
    given, result = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    early = machine_of(y.device).early and is_unit_last(given) and is_unit_last(result)  # a copy may not be finished when they are read
    given, result = unit_last(given), unit_last(result)
    (count, length), width, rank, parts = given.shape, result.shape[1], b.shape[2], len(rows)
    tiling = tiling or LoraTiling.of(count, rank, y.element_size(), machine_of(y.device).shared_bytes)
    blocks, adapters = triton.cdiv(count, tiling.rows), len(a) if tiling.each else 1
    products = blocks * parts * adapters
    splits = _splits(products, min(triton.cdiv(length, tiling.columns), tiling.splits))
    inner = torch.empty((splits, count, parts * rank), dtype=torch.float32, device=y.device)
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    device = device_index(y.device)
    constants = {
        "RANK": rank, "PARTS": parts, "PRECISION": _precision(y.dtype), "EACH": tiling.each, "EARLY": early,
        "BLOCK_M": tiling.rows, "BLOCK_R": _block(rank),
    }  # fmt: skip
    options = {"num_warps": 4, "launch_pdl": early, "num_stages": stages_of(rank)}
    sizes = (length, width, given.stride(0), result.stride(0), a.stride(0), b.stride(0))
    key = (y.dtype, tiling, splits, tuple(rows), rank, adapters, early, sizes)
    first = (given, a, slots, inner, _arrived(y.device, a.data_ptr()), count, length, given.stride(0), a.stride(0))
    more = {"SPLITS": splits, "BLOCK_K": tiling.columns}
    _fast_shrink(key, (blocks, products // blocks * splits), first, {**constants, **more}, options, device)
    start = 0
    for part, outputs, second, third in _launches(rows, tiling.outputs):
        tiles = triton.cdiv(outputs, tiling.outputs)
        arguments = (
            result, inner, b, scales, slots, out, count, width, result.stride(0), b.stride(0), start, start + outputs, part, second, third,
        )  # fmt: skip
        more = {"TILES": tiles, "BLOCK_N": tiling.outputs}
        _fast_expand((*key, part, start, outputs), (blocks * tiles * adapters, 1), arguments, {**constants, **more}, options, device)
        start += outputs
    return out


def lora_up_on_gpu(
    y: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int], tiling: UpTiling | None = None
) -> Tensor | None:
    """Computes the op; None for a dtype without a kernel of ours."""
    if y.dtype not in DTYPES or y.dtype != b.dtype:
        return None
    result, (adapters, width, rank) = y.reshape(-1, y.shape[-1]), b.shape
    early = machine_of(y.device).early and is_unit_last(result)
    result, count = unit_last(result), len(result)
    tiling = tiling or UpTiling.of(count)
    out = torch.empty((*y.shape[:-1], width), dtype=y.dtype, device=y.device)
    constants = {
        "ADAPTERS": adapters, "RANK": rank, "PARTS": len(rows), "PRECISION": _precision(y.dtype), "EARLY": early, "BLOCK_M": tiling.rows,
        "BLOCK_N": tiling.outputs, "TOGETHER": tiling.together,
        "BLOCK_K": min(_block(adapters * rank if tiling.together else rank), LONGEST_PRODUCT),
    }  # fmt: skip
    key = (y.dtype, tiling, tuple(rows), adapters, rank, early, width, result.stride(0), b.stride(0))
    options, start = {"num_warps": 4, "launch_pdl": early, "num_stages": stages_of(rank)}, 0
    for part, outputs, second, third in _launches(rows, tiling.outputs):
        grid = (triton.cdiv(outputs, tiling.outputs), triton.cdiv(count, tiling.rows))
        arguments = (
            result, b, scales, slots, out, count, width, result.stride(0), b.stride(0), start, start + outputs, part, second, third,
        )  # fmt: skip
        _fast_up((*key, part, start, outputs), grid, arguments, constants, options, device_index(y.device))
        start += outputs
    return out


def stages_of(rank: int) -> int:
    """How many blocks of factors are in flight at once: long ranks leave no room for a second one."""
    return 3 if rank <= LONGEST_PRODUCT else 1


def _block(rank: int) -> int:
    return max(int(triton.next_power_of_2(rank)), 16)


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


@functools.cache
def _arrived(device: torch.device, adapters: int) -> Tensor:
    """Zero between any two launches; cached by the address of the adapters' tensor, since several engines may run."""
    return torch.zeros(PRODUCTS, dtype=torch.int32, device=device)


def _launches(rows: Sequence[int], block: int) -> list[tuple[int, int, int, int]]:
    """Launches of the second kernel: (first part, number of outputs, starts of the next two parts). Up to three parts share a launch if no
    block of outputs spans two."""
    if len(rows) <= 3 and all(outputs % block == 0 for outputs in rows[:-1]):
        second, third = (sum(rows[:part]) if part < len(rows) else NEVER for part in (1, 2))
        return [(0, sum(rows), second, third)]
    return [(part, outputs, NEVER, NEVER) for part, outputs in enumerate(rows)]


def _splits(products: int, most: int) -> int:
    """The number of sums over which the columns are divided: a power of 2, since each number is a separately compiled kernel."""
    if products > PRODUCTS:
        return 1
    wanted = min(PROGRAMS // max(products, 1), most)
    return 1 << max(wanted.bit_length() - 1, 0)
