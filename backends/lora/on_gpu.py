"""Launches the kernels of `paged_attn::lora` and `lora_up`. Nothing depends on which rows have which adapter, so that captured graphs
replay any."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from paged_attn.backends.attention.triton.tiling import machine_of
from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.lora.kernels import expand_kernel, shrink_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROGRAMS = 1024  # of the first kernel at least, so that few rows are read by enough of them
FEW_ROWS = 128  # up to so many, each adapter has programs of its own
NEVER = 2**31 - 1
PRODUCTS = 1024  # of the first kernel that programs may share
_fast_shrink, _fast_expand = FastKernel(shrink_kernel), FastKernel(expand_kernel)


@dataclass(frozen=True)
class LoraTiling:
    """How a launch cuts its work; sizes are powers of 2.

    Attributes:
        rows, columns: of x that a program reads at a time, 16 at least.
        outputs: of a program of the second kernel, 16 at least.
        splits: into how many programs' sums the columns are shared out at most.
        each: whether each adapter has programs of its own.
    """

    rows: int
    columns: int = 128
    outputs: int = 128
    splits: int = 16
    each: bool = True

    @classmethod
    def of(cls, count: int) -> LoraTiling:
        if count == 1:
            return cls(rows=16, each=False)
        if count <= 16:
            return cls(rows=16, columns=256)
        if count <= FEW_ROWS:
            return cls(rows=min(triton.next_power_of_2(count), 64), splits=8)
        return cls(rows=64, outputs=64, each=False)


def lora_on_gpu(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int], tiling: LoraTiling | None = None
) -> Tensor | None:
    """As the op; None for a dtype that no kernel of ours serves."""
    if y.dtype not in DTYPES or len({y.dtype, x.dtype, a.dtype, b.dtype}) != 1:
        return None
    given, result = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    given, result = (each if each.stride(1) == 1 else each.contiguous() for each in (given, result))
    (count, length), rank, parts = given.shape, b.shape[2], len(rows)
    tiling = tiling or LoraTiling.of(count)
    blocks, adapters = triton.cdiv(count, tiling.rows), len(a) if tiling.each else 1
    products = blocks * parts * adapters
    splits = _splits(products, min(triton.cdiv(length, tiling.columns), tiling.splits))
    inner = torch.empty((splits, count, parts * rank), dtype=torch.float32, device=y.device)
    early, device = machine_of(y.device).early, device_index(y.device)
    constants = {"RANK": rank, "PARTS": parts, "EACH": tiling.each, "EARLY": early, **_blocks(y.dtype, rank, tiling)}
    key = (y.dtype, tiling, splits, parts, rank, adapters, length, given.stride(0), a.stride(0))
    arguments = (given, a, slots, inner, _arrived(y.device, a.data_ptr()), count, length, given.stride(0), a.stride(0))
    more = {"SPLITS": splits, "BLOCK_K": tiling.columns}
    options = {"num_warps": 4, "launch_pdl": early}
    _fast_shrink(key, (blocks, products // blocks * splits), arguments, {**constants, **more}, options, device)
    return _expanded(result, inner[0], b, scales, slots, rows, tiling, behind=False).view(y.shape)


def lora_up_on_gpu(
    y: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int], tiling: LoraTiling | None = None
) -> Tensor | None:
    """As the op; None for a dtype that no kernel of ours serves."""
    if y.dtype not in DTYPES or y.dtype != b.dtype:
        return None
    result, outputs = y.reshape(-1, y.shape[-1]), b.shape[1]
    result = result if result.stride(1) == 1 else result.contiguous()
    tiling = tiling or LoraTiling.of(len(result))
    out = _expanded(result[:, :outputs], result[:, outputs:], b, scales, slots, rows, tiling, behind=True)
    return out.view(*y.shape[:-1], outputs)


def _expanded(
    result: Tensor, inner: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int], tiling: LoraTiling, behind: bool
) -> Tensor:
    """result [count, N], inner as `expand_kernel` says -> [count, N]."""
    (count, width), (adapters, _, rank) = result.shape, b.shape
    out = torch.empty((count, width), dtype=result.dtype, device=result.device)
    early, device = machine_of(result.device).early, device_index(result.device)
    constants = {
        "RANK": rank, "PARTS": len(rows), "EACH": tiling.each, "EARLY": early, "BEHIND": behind, "BLOCK_N": tiling.outputs,
        **_blocks(result.dtype, rank, tiling),
    }  # fmt: skip
    strides = result.stride(0), inner.stride(0), b.stride(0)
    key = (result.dtype, tiling, behind, tuple(rows), rank, adapters, strides)
    blocks, start = triton.cdiv(count, tiling.rows), 0
    for part, outputs, second, third in _launches(rows, tiling.outputs):
        tiles = triton.cdiv(outputs, tiling.outputs)
        arguments = (result, inner, b, scales, slots, out, count, width, *strides, start, start + outputs, part, second, third)
        grid, options = (blocks, tiles * (adapters if tiling.each else 1)), {"num_warps": 4, "launch_pdl": early}
        _fast_expand((*key, part, start, outputs), grid, arguments, {**constants, "TILES": tiles}, options, device)
        start += outputs
    return out


def _blocks(dtype: torch.dtype, rank: int, tiling: LoraTiling) -> dict[str, int | str]:
    precision = "ieee" if dtype == torch.float32 else "tf32"
    return {"PRECISION": precision, "BLOCK_M": tiling.rows, "BLOCK_R": max(triton.next_power_of_2(rank), 16)}


@functools.cache
def _arrived(device: torch.device, adapters: int) -> Tensor:
    """Zeros between any two launches; for each tensor of adapters, by its address, since engines run beside each other."""
    return torch.zeros(PRODUCTS, dtype=torch.int32, device=device)


def _launches(rows: Sequence[int], block: int) -> list[tuple[int, int, int, int]]:
    """Of the second kernel: the first part, how many outputs, and where the next two parts begin. Up to three parts share a launch, where
    no block of outputs lies in two."""
    if len(rows) <= 3 and all(outputs % block == 0 for outputs in rows[:-1]):
        second, third = (sum(rows[:part]) if part < len(rows) else NEVER for part in (1, 2))
        return [(0, sum(rows), second, third)]
    return [(part, outputs, NEVER, NEVER) for part, outputs in enumerate(rows)]


def _splits(products: int, most: int) -> int:
    """Into how many sums the columns are shared out: a power of 2, as each number is another compiled kernel."""
    if products > PRODUCTS:
        return 1
    wanted = min(PROGRAMS // max(products, 1), most)
    return 1 << max(wanted.bit_length() - 1, 0)
