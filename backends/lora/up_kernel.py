"""The second half of adapters, up to the outputs, for layers whose own product has already multiplied by the first factors of all adapters.

With few rows, each row keeps its own adapter's part and has zeros for all others. Then one product with the second factors of all adapters
serves every row. The zeros cannot meet NaN or infinity: factors are finite (`adapter_files.py`). With one row, or with many, a program
handles the adapters of its block one after the other; neighbours among many rows mostly have the same adapter.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def up_kernel(y, b, scales, slots, out, count, width, y_stride, slot_stride, start, end, part, second, third,
              ADAPTERS: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
              TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Columns `start` to `end - 1` of out [count, width]; b [ADAPTERS, width, RANK], scales [ADAPTERS, PARTS].

    y [count, width + ADAPTERS * PARTS * RANK] holds the outputs, and after them some columns for each slot and part. out is the outputs.
    To rows with an adapter, scales[slot, part] * b[slot] @ y's columns for that slot and part is added.
    The columns belong to `part`, from `second` on to the next one, from `third` on to the one after it. BLOCK_K ranks at a time, of all
    adapters (TOGETHER) or one after the other. Grid (cdiv(end - start, BLOCK_N), cdiv(count, BLOCK_M)).

    EARLY: launched before the previous kernel, which writes y, has ended; everything else is older.
    """
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = start + tl.program_id(0) * BLOCK_N
    part += (begin >= second).to(tl.int32) + (begin >= third).to(tl.int32)
    n, k = begin + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    slot = tl.load(slots + rows, mask=rows < count, other=-1)
    scale = tl.load(scales + slot * PARTS + part, mask=slot >= 0, other=0.0)
    kept = (n < end)[None, :]
    last = tl.max(slot, 0)
    first = tl.min(tl.where(slot < 0, last, slot), 0)
    factor, jump = b + n[None, :].to(tl.int64) * RANK, tl.cast(slot_stride, tl.int64)
    if TOGETHER:
        most: tl.constexpr = ADAPTERS * RANK
        begin_at = factor
    else:
        most: tl.constexpr = RANK
        begin_at = factor + first * jump
        kept = kept & (last >= 0)
    up = _factors(begin_at, k, most, jump, kept, RANK)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = y + rows[:, None].to(tl.int64) * y_stride
    inside = (rows < count)[:, None] & (n < end)[None, :]
    total = tl.load(row + n[None, :], mask=inside, other=0.0).to(tl.float32)
    if last >= 0:
        own = row + width + part * RANK
        added = tl.dot(_own(own, k, most, first, slot, RANK, PARTS, TOGETHER), up, input_precision=PRECISION)
        for start_k in tl.static_range(BLOCK_K, most, BLOCK_K):
            up = _factors(begin_at, start_k + k, most, jump, kept, RANK)
            added = tl.dot(_own(own, start_k + k, most, first, slot, RANK, PARTS, TOGETHER), up, added, input_precision=PRECISION)
        if not TOGETHER:
            for each in range(first + 1, last + 1):
                if tl.max((slot == each).to(tl.int32), 0) > 0:
                    for start_k in tl.static_range(0, most, BLOCK_K):
                        up = _factors(factor + each * jump, start_k + k, most, jump, kept, RANK)
                        added = tl.dot(_own(own, start_k + k, most, each, slot, RANK, PARTS, False), up, added, input_precision=PRECISION)
        total += tl.where((slot >= 0)[:, None], added * scale[:, None], 0.0)
    tl.store(out + rows[:, None].to(tl.int64) * width + n[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _factors(factor, k, most: tl.constexpr, jump, kept, RANK: tl.constexpr):
    """Ranks k of the second factors, one adapter after the other."""
    at = factor + (k // RANK)[:, None] * jump + (k % RANK)[:, None]
    return tl.load(at, mask=(k < most)[:, None] & kept, other=0.0)


@triton.jit
def _own(own, k, most: tl.constexpr, each, slot, RANK: tl.constexpr, PARTS: tl.constexpr, TOGETHER: tl.constexpr):
    """Ranks k of the products with the first factors, of all adapters or of `each`; zeros unless they are of the row's own adapter."""
    adapter = k // RANK
    if not TOGETHER:
        adapter += each
    at = own + (adapter * (PARTS * RANK) + k % RANK)[None, :]
    return tl.load(at, mask=(slot[:, None] == adapter[None, :]) & (k < most)[None, :], other=0.0)
