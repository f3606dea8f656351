"""One row of numbers times rows of a weight."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def one_row_kernel(
    x, weight, bias, out, count, length, row_stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, REST_K: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x [length], weight [count, length], bias and out [count]; grid (cdiv(count, BLOCK_N),); BLOCK_K + REST_K hold a whole row."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = weight + n[:, None].to(tl.int64) * row_stride
    given = (n < count)[:, None]
    # Each weight is read once per step and must not evict data from the L2 that is read again.
    w = tl.load(rows + k[None, :], mask=given & (k < length)[None, :], other=0.0, eviction_policy="evict_first")
    if REST_K > 0:
        rest_k = BLOCK_K + tl.arange(0, REST_K)
        rest = tl.load(rows + rest_k[None, :], mask=given & (rest_k < length)[None, :], other=0.0, eviction_policy="evict_first")
    if EARLY:
        tl.extra.cuda.gdc_wait()  # above: only reads of constants; below: reads of earlier kernels' results, and writes
        tl.extra.cuda.gdc_launch_dependents()  # not earlier: Inductor's kernels assume that the kernel before them has waited
    row = tl.load(x + k, mask=k < length, other=0.0)
    total = tl.sum(w.to(tl.float32) * row.to(tl.float32)[None, :], 1)
    if REST_K > 0:
        rest_row = tl.load(x + rest_k, mask=rest_k < length, other=0.0)
        total += tl.sum(rest.to(tl.float32) * rest_row.to(tl.float32)[None, :], 1)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < count, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < count)
