"""A residual addition and an RMS norm: of any number of rows, and of one row within the product with a weight."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    x, residual, scale, normed, total, length, x_stride, residual_stride, eps, offset, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """x, residual, normed and total [T, length], scale [length]; grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    given = k < length
    factor = tl.load(scale + k, mask=given, other=0.0).to(tl.float32) + offset
    if EARLY:
        tl.extra.cuda.gdc_wait()  # above: only reads of constants
        tl.extra.cuda.gdc_launch_dependents()  # not earlier: Inductor's kernels assume that the kernel before them has waited
    first = tl.load(x + row * x_stride + k, mask=given, other=0.0).to(tl.float32)
    second = tl.load(residual + row * residual_stride + k, mask=given, other=0.0).to(tl.float32)
    added = (first + second).to(total.dtype.element_ty)
    tl.store(total + row * length + k, added, mask=given)
    wide = added.to(tl.float32)
    shrink = tl.rsqrt(tl.sum(wide * wide, 0) / length + eps)
    tl.store(normed + row * length + k, (wide * shrink * factor).to(normed.dtype.element_ty), mask=given)


@triton.jit
def add_norm_linear_kernel(
    x, residual, scale, weight, bias, out, normed, total, count, length, row_stride, eps, offset,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, REST_K: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x, residual, scale, normed and total [length], weight [count, length], bias and out [count]; grid (cdiv(count, BLOCK_N),). BLOCK_K +
    REST_K hold a whole row. Every program adds and squares the whole row, which costs nothing while its weights arrive."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = weight + n[:, None].to(tl.int64) * row_stride
    given = (n < count)[:, None]
    # As in one_row_kernel: weights are asked for before the wait, and must not evict what is read again.
    w = tl.load(rows + k[None, :], mask=given & (k < length)[None, :], other=0.0, eviction_policy="evict_first")
    factor = tl.load(scale + k, mask=k < length, other=0.0).to(tl.float32) + offset
    if REST_K > 0:
        rest_k = BLOCK_K + tl.arange(0, REST_K)
        rest = tl.load(rows + rest_k[None, :], mask=given & (rest_k < length)[None, :], other=0.0, eviction_policy="evict_first")
        rest_factor = tl.load(scale + rest_k, mask=rest_k < length, other=0.0).to(tl.float32) + offset
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.load(x + k, mask=k < length, other=0.0).to(tl.float32)
    added = (first + tl.load(residual + k, mask=k < length, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
    is_first = tl.program_id(0) == 0  # in masks: with a branch the same kernel takes up to 30 us more
    tl.store(total + k, added, mask=is_first & (k < length))
    wide = added.to(tl.float32)
    squares = tl.sum(wide * wide, 0)
    if REST_K > 0:
        rest_first = tl.load(x + rest_k, mask=rest_k < length, other=0.0).to(tl.float32)
        rest_added = (rest_first + tl.load(residual + rest_k, mask=rest_k < length, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + rest_k, rest_added, mask=is_first & (rest_k < length))
        rest_wide = rest_added.to(tl.float32)
        squares += tl.sum(rest_wide * rest_wide, 0)
    shrink = tl.rsqrt(squares / length + eps)
    # Rounded, although nobody stores it: a router that read other numbers than in several rows would choose other experts.
    row = (wide * shrink * factor).to(total.dtype.element_ty)
    tl.store(normed + k, row, mask=is_first & KEEP & (k < length))
    result = tl.sum(w.to(tl.float32) * row.to(tl.float32)[None, :], 1)
    if REST_K > 0:
        rest_row = (rest_wide * shrink * rest_factor).to(total.dtype.element_ty)
        tl.store(normed + rest_k, rest_row, mask=is_first & KEEP & (rest_k < length))
        result += tl.sum(rest.to(tl.float32) * rest_row.to(tl.float32)[None, :], 1)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n < count, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < count)
