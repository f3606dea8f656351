"""Reading a tensor once, front to back, and nothing else: PyTorch's reductions stop 6 to 12 % short of what the memory gives."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16384  # elements per program, 64 KiB of float32


@triton.jit
def _read(data, out, BLOCK: tl.constexpr):
    """data of non-negative numbers, of which no part's largest is below 0, so that `out` is never written."""
    largest = tl.max(tl.load(data + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)), 0)
    tl.store(out, largest, mask=largest < 0)


def read_sweep(data: Tensor) -> None:
    """data float32 of non-negative numbers, as many as a multiple of `BLOCK`."""
    _read[(data.numel() // BLOCK,)](data, data, BLOCK, num_warps=8)
