"""Rows times the factors of their adapters, in two kernels: down to the rank, and up to the outputs.

A program takes a block of neighbouring rows. With few rows (EACH) a program handles only one adapter's rows of the block, so no program
works through all adapters in turn. With many rows it handles the block's adapters one after the other: tokens of one request are adjacent,
so a block of a prompt usually has one adapter. Rows of other adapters take part with zeros and keep their values.

EARLY: launched before the previous kernel has ended. Before the wait, only what older kernels wrote is read: constants, slots, and rows
that a linear layer has read in between. The second kernel, which follows the first, may also read that linear layer's outputs.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def shrink_kernel(x, a, slots, inner, arrived, count, length, x_stride, slot_stride,
                  RANK: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
                  EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """x [count, length], a [slots, PARTS * RANK, length], slots [count] -> inner [SPLITS, count, PARTS * RANK] float32: inner[0] gets the
    products, the others sums over every SPLITS-th block of columns; rows without an adapter are not written.
    Grid (cdiv(count, BLOCK_M), PARTS * SPLITS), with EACH times the number of adapters. The last of the SPLITS programs of one product
    adds up what all have written, in their order; arrived [grid / SPLITS] counts them, from 0 back to 0."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split, part = tl.program_id(1) % SPLITS, tl.program_id(1) // SPLITS % PARTS
    slot = tl.load(slots + rows, mask=rows < count, other=-1)
    if EACH:
        first = tl.program_id(1) // (SPLITS * PARTS)
        last = first
        slot = tl.where(slot == first, slot, -1)
        wanted = tl.max(slot, 0) >= 0
    else:
        last = tl.max(slot, 0)
        first = tl.min(tl.where(slot < 0, last, slot), 0)
        wanted = last >= 0
    r, jump = tl.arange(0, BLOCK_R), tl.cast(slot_stride, tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    if wanted:
        for each in range(first, last + 1):
            own = slot == each
            if tl.max(own.to(tl.int32), 0) > 0:
                factor = a + each * jump + (part * RANK + r[None, :]).to(tl.int64) * length
                sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                for start in range(split * BLOCK_K, length, SPLITS * BLOCK_K):
                    k = start + tl.arange(0, BLOCK_K)
                    down = tl.load(factor + k[:, None], mask=(k < length)[:, None] & (r < RANK)[None, :], other=0.0)
                    mask = own[:, None] & (k < length)[None, :]
                    given = tl.load(x + rows[:, None].to(tl.int64) * x_stride + k[None, :], mask=mask, other=0.0)
                    sums += tl.dot(given, down, input_precision=PRECISION)
                total = tl.where(own[:, None], sums, total)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if wanted:
        one = count.to(tl.int64) * (PARTS * RANK)
        at = inner + rows[:, None].to(tl.int64) * (PARTS * RANK) + part * RANK + r[None, :]
        mask = (slot >= 0)[:, None] & (r < RANK)[None, :]
        tl.store(at + split * one, total, mask=mask)
        if SPLITS > 1:
            product = arrived + tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) // SPLITS)
            tl.debug_barrier()  # all threads have written
            if tl.atomic_add(product, 1, sem="acq_rel") == SPLITS - 1:
                total = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
                for other in tl.static_range(1, SPLITS):
                    total += tl.load(at + other * one, mask=mask, other=0.0, cache_modifier=".cg")
                tl.debug_barrier()  # all threads have read the first one
                tl.store(at, total, mask=mask)
                tl.store(product, 0)


@triton.jit(do_not_specialize=["count"])
def expand_kernel(y, inner, b, scales, slots, out, count, width, y_stride, slot_stride, start, end, part, second, third,
                  RANK: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr, EARLY: tl.constexpr,
                  TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """Columns `start` to `end - 1` of out [count, width]: y, plus for rows with an adapter scales[slot, part] * b[slot] @ inner;
    b [slots, width, RANK], scales [slots, PARTS]. The columns belong to `part`, from `second` on to the next one, from `third` on to the
    one after it. Grid cdiv(count, BLOCK_M) * TILES, TILES = cdiv(end - start, BLOCK_N), with EACH times the number of adapters, which vary
    slowest; the first adapter's programs also write rows without one."""
    blocks = tl.cdiv(count, BLOCK_M)
    rows, tile = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(0) // blocks
    begin = start + tile % TILES * BLOCK_N
    part += (begin >= second).to(tl.int32) + (begin >= third).to(tl.int32)
    n = begin + tl.arange(0, BLOCK_N)
    slot = tl.load(slots + rows, mask=rows < count, other=-1)
    mine = rows < count
    if EACH:
        first = tile // TILES
        last = first
        mine = mine & ((slot == first) | ((slot < 0) & (first == 0)))
        slot = tl.where(slot == first, slot, -1)
        wanted = tl.max(slot, 0) >= 0
    else:
        last = tl.max(slot, 0)
        first = tl.min(tl.where(slot < 0, last, slot), 0)
        wanted = last >= 0
    inside = mine[:, None] & (n < end)[None, :]
    total = tl.load(y + rows[:, None].to(tl.int64) * y_stride + n[None, :], mask=inside, other=0.0).to(tl.float32)
    r, jump = tl.arange(0, BLOCK_R), tl.cast(slot_stride, tl.int64)
    factor = b + n[None, :].to(tl.int64) * RANK + r[:, None]
    if EACH:
        kept = wanted & (n < end)[None, :] & (r < RANK)[:, None]
        up = tl.load(factor + first * jump, mask=kept, other=0.0)  # loaded while the previous kernel ends
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if wanted:
        at = inner + rows[:, None].to(tl.int64) * (PARTS * RANK) + part * RANK + r[None, :]
        low = tl.load(at, mask=(slot >= 0)[:, None] & (r < RANK)[None, :], other=0.0)
        if EACH:
            added = tl.dot(low, up.to(tl.float32), input_precision=PRECISION) * tl.load(scales + first * PARTS + part)
            total += tl.where((slot == first)[:, None], added, 0.0)
        else:
            for each in range(first, last + 1):
                own = slot == each
                if tl.max(own.to(tl.int32), 0) > 0:
                    up = tl.load(factor + each * jump, mask=(n < end)[None, :] & (r < RANK)[:, None], other=0.0).to(tl.float32)
                    added = tl.dot(low, up, input_precision=PRECISION) * tl.load(scales + each * PARTS + part)
                    total += tl.where(own[:, None], added, 0.0)
    tl.store(out + rows[:, None].to(tl.int64) * width + n[None, :], total.to(out.dtype.element_ty), mask=inside)
