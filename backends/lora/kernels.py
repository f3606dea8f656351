"""Rows times the factors of their adapters, in two kernels: down to the rank, and up to the outputs.

A program takes a block of neighbouring rows, and of these one adapter after the other: tokens of one request lie beside each other, so that
a block of a prompt has one adapter. Rows of others take part with zeros and keep what they have.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def shrink_kernel(x, a, slots, inner, count, length, x_stride, slot_stride,
                  RANK: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """x [count, length], a [slots, PARTS * RANK, length], slots [count] -> inner [SPLITS, count, PARTS * RANK] float32, the sums of every
    SPLITS-th block of columns; nothing is written for rows without an adapter. Grid (cdiv(count, BLOCK_M), PARTS, SPLITS)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    part, split = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + rows, mask=rows < count, other=-1)
    last = tl.max(slot, 0)
    if last >= 0:
        first = tl.min(tl.where(slot < 0, last, slot), 0)
        r, jump = tl.arange(0, BLOCK_R), tl.cast(slot_stride, tl.int64)
        total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for each in range(first, last + 1):
            own = slot == each
            if tl.max(own.to(tl.int32), 0) > 0:
                factor = a + each * jump + (part * RANK + r[None, :]).to(tl.int64) * length
                sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                for start in range(split * BLOCK_K, length, SPLITS * BLOCK_K):
                    k = start + tl.arange(0, BLOCK_K)
                    mask = own[:, None] & (k < length)[None, :]
                    given = tl.load(x + rows[:, None].to(tl.int64) * x_stride + k[None, :], mask=mask, other=0.0)
                    down = tl.load(factor + k[:, None], mask=(k < length)[:, None] & (r < RANK)[None, :], other=0.0)
                    sums += tl.dot(given, down, input_precision=PRECISION)
                total = tl.where(own[:, None], sums, total)
        at = inner + (split * count + rows[:, None]).to(tl.int64) * (PARTS * RANK) + part * RANK + r[None, :]
        tl.store(at, total, mask=(slot >= 0)[:, None] & (r < RANK)[None, :])


@triton.jit(do_not_specialize=["count"])
def expand_kernel(y, inner, b, scales, slots, out, count, width, y_stride, slot_stride, start, end, part,
                  RANK: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """Columns `start` to `end` of out [count, width]: those of y, and of rows with an adapter scales[slot, part] * b[slot] @ inner as well;
    b [slots, width, RANK], scales [slots, PARTS]. Grid (cdiv(count, BLOCK_M), cdiv(end - start, BLOCK_N))."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = start + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < count)[:, None] & (n < end)[None, :]
    total = tl.load(y + rows[:, None].to(tl.int64) * y_stride + n[None, :], mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + rows, mask=rows < count, other=-1)
    last = tl.max(slot, 0)
    if last >= 0:
        first = tl.min(tl.where(slot < 0, last, slot), 0)
        r, jump = tl.arange(0, BLOCK_R), tl.cast(slot_stride, tl.int64)
        low = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for split in range(SPLITS):
            at = inner + (split * count + rows[:, None]).to(tl.int64) * (PARTS * RANK) + part * RANK + r[None, :]
            low += tl.load(at, mask=(slot >= 0)[:, None] & (r < RANK)[None, :], other=0.0)
        for each in range(first, last + 1):
            own = slot == each
            if tl.max(own.to(tl.int32), 0) > 0:
                factor = b + each * jump + n[None, :].to(tl.int64) * RANK + r[:, None]
                up = tl.load(factor, mask=(n < end)[None, :] & (r < RANK)[:, None], other=0.0).to(tl.float32)
                added = tl.dot(low, up, input_precision=PRECISION) * tl.load(scales + each * PARTS + part)
                total += tl.where(own[:, None], added, 0.0)
    tl.store(out + rows[:, None].to(tl.int64) * width + n[None, :], total.to(out.dtype.element_ty), mask=inside)
