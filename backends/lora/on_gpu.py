"""Launches the kernels of `paged_attn::lora`. Nothing depends on which rows have which adapter, so that captured graphs replay any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from paged_attn.backends.lora.kernels import expand_kernel, shrink_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROGRAMS = 256  # of the first kernel at least, so that few rows are read by enough of them
MOST_SPLITS = 16
FEW_ROWS = 128


@dataclass(frozen=True)
class LoraTiling:
    """Rows of a program; columns of x that it reads at a time; outputs of a program of the second kernel. Powers of 2, 16 at least."""

    rows: int
    columns: int = 128
    outputs: int = 64

    @classmethod
    def of(cls, count: int) -> LoraTiling:
        return cls(rows=16 if count <= FEW_ROWS else 64)


def lora_on_gpu(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int], tiling: LoraTiling | None = None
) -> Tensor | None:
    """As the op; None for a dtype that no kernel of ours serves."""
    if y.dtype not in DTYPES or len({y.dtype, x.dtype, a.dtype, b.dtype}) != 1:
        return None
    given, result = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    given, result = (each if each.stride(1) == 1 else each.contiguous() for each in (given, result))
    (count, length), width, rank, parts = given.shape, result.shape[1], b.shape[2], len(rows)
    tiling = tiling or LoraTiling.of(count)
    blocks, block_r = triton.cdiv(count, tiling.rows), max(triton.next_power_of_2(rank), 16)
    splits = _splits(blocks * parts, triton.cdiv(length, tiling.columns))
    inner = torch.empty((splits, count, parts * rank), dtype=torch.float32, device=y.device)
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    precision = "ieee" if y.dtype == torch.float32 else "tf32"
    common = {"RANK": rank, "PARTS": parts, "SPLITS": splits, "PRECISION": precision, "BLOCK_M": tiling.rows, "BLOCK_R": block_r}
    shrink_kernel[(blocks, parts, splits)](
        given, a, slots, inner, count, length, given.stride(0), a.stride(0), **common, BLOCK_K=tiling.columns
    )
    start = 0
    for part, outputs in enumerate(rows):
        expand_kernel[(blocks, triton.cdiv(outputs, tiling.outputs))](
            result, inner, b, scales, slots, out, count, width, result.stride(0), b.stride(0), start, start + outputs, part,
            **common, BLOCK_N=tiling.outputs,
        )  # fmt: skip
        start += outputs
    return out


def _splits(programs: int, blocks: int) -> int:
    """Into how many sums the columns are shared out: a power of 2, as each number is another compiled kernel."""
    wanted = min(PROGRAMS // max(programs, 1), blocks, MOST_SPLITS)
    return 1 << max(wanted.bit_length() - 1, 0)
