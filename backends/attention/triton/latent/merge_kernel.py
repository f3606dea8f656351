"""Merges the parts of items that were cut, with one program per item, row of the tile and group of columns.

In the kernel of the room above, the program that adds an item's last part merges all of them. Here one KV head serves all query heads, so
a decode step of one request is one or two items for all programs: a single program would merge a hundred parts of up to 128 KiB.

A cut item is the first one of the program that has its last part, so the programs' rows of `work` name each cut item once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.attention.triton.tiles import first_item

LOG2E = tl.constexpr(1.4426950408889634)
NO_KEY = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["programs"])
def merge_latent(out, lse, work, partial, partial_stats, programs, out_row_stride, out_head_stride, lse_row_stride,
                 GROUP: tl.constexpr, RANK: tl.constexpr, HAS_LSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
                 KEEP_ROWS: tl.constexpr, SHARES: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
                 EARLY: tl.constexpr):  # fmt: skip
    """Grid (programs / SHARES, KEEP_ROWS * BLOCK_R / COLUMNS): a program merges COLUMNS of a row, PARTS parts at once, of each item whose
    last part belongs to one of SHARES programs.
    """
    if EARLY:  # launched before the previous kernel has ended (PDL): wait for its results
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0) * SHARES + tl.arange(0, SHARES)
    there = index < programs
    left = tl.load(work + index * 16 + 4, mask=there, other=0)
    first = tl.load(work + index * 16 + 5, mask=there, other=0)
    last = tl.load(work + index * 16 + 6, mask=there, other=0)
    cut = (left > 0) & (last == index) & (first < index)
    program = tl.min(tl.where(cut, index, programs), 0)
    while program < programs:
        _merge_row(program, out, lse, work, partial, partial_stats, out_row_stride, out_head_stride, lse_row_stride, GROUP, RANK, HAS_LSE,
                   BLOCK_M, BLOCK_R, KEEP_ROWS, COLUMNS, PARTS)  # fmt: skip
        program = tl.min(tl.where(cut & (index > program), index, programs), 0)


@triton.jit
def _merge_row(program, out, lse, work, partial, partial_stats, out_row_stride, out_head_stride, lse_row_stride,
               GROUP: tl.constexpr, RANK: tl.constexpr, HAS_LSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
               KEEP_ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    STATS: tl.constexpr = 128
    mine = work + program * 16
    _, tile, _, _, _, start, query_len, _ = first_item(mine)
    part_first = tl.load(mine + 5)
    part_slot = tl.load(mine + 7)
    parts = program - part_first + 1
    kept = tl.program_id(1) // (BLOCK_R // COLUMNS)
    d = tl.program_id(1) % (BLOCK_R // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    flat = tile * BLOCK_M + kept
    if flat < query_len * GROUP:
        # Most items have few parts: their sums are loaded before the weights are used.
        acc = tl.load(_sums_at(tl.arange(0, PARTS), partial, part_slot, part_first, kept, d, KEEP_ROWS, BLOCK_R),
                      mask=(tl.arange(0, PARTS) < parts)[:, None], other=0.0)  # fmt: skip
        first_m = tl.load(_stats_at(tl.arange(0, PARTS), partial_stats, part_slot, part_first, kept, KEEP_ROWS),
                          mask=tl.arange(0, PARTS) < parts, other=NO_KEY)  # fmt: skip
        # Each lane has every STATS-th part. Parts in which nothing was seen add zeros, however many follow.
        m = tl.full([STATS], NO_KEY, tl.float32)
        norm = tl.zeros([STATS], tl.float32)
        for p in tl.range(0, parts, STATS):
            part = p + tl.arange(0, STATS)
            at = _stats_at(part, partial_stats, part_slot, part_first, kept, KEEP_ROWS)
            part_m = tl.load(at, mask=part < parts, other=NO_KEY)
            part_norm = tl.load(at + KEEP_ROWS, mask=part < parts, other=0.0)
            m_new = tl.maximum(m, part_m)
            shift = tl.where(m_new == NO_KEY, 0.0, m_new)
            norm = norm * tl.exp2(m - shift) + part_norm * tl.exp2(part_m - shift)
            m = m_new
        top = tl.max(m, 0)
        shift = tl.where(top == NO_KEY, 0.0, top)
        total = tl.sum(norm * tl.exp2(m - shift), 0)
        acc = acc * tl.exp2(first_m - shift)[:, None]
        for p in tl.range(PARTS, parts, PARTS):
            part = p + tl.arange(0, PARTS)
            part_m = tl.load(_stats_at(part, partial_stats, part_slot, part_first, kept, KEEP_ROWS), mask=part < parts, other=NO_KEY)
            at = _sums_at(part, partial, part_slot, part_first, kept, d, KEEP_ROWS, BLOCK_R)
            acc += tl.load(at, mask=(part < parts)[:, None], other=0.0) * tl.exp2(part_m - shift)[:, None]
        row = start + flat // GROUP
        head = flat % GROUP
        result = (tl.sum(acc, 0) / total).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * out_row_stride + head * out_head_stride + d, result, mask=d < RANK)
        if HAS_LSE and tl.program_id(1) % (BLOCK_R // COLUMNS) == 0:
            tl.store(lse + row.to(tl.int64) * lse_row_stride + head, (top + tl.log2(total)) / LOG2E)


@triton.jit
def _stats_at(part, partial_stats, part_slot, part_first, kept, KEEP_ROWS: tl.constexpr):
    return partial_stats + tl.where(part == 0, part_slot, 2 * (part_first + part)) * (2 * KEEP_ROWS) + kept


@triton.jit
def _sums_at(part, partial, part_slot, part_first, kept, d, KEEP_ROWS: tl.constexpr, BLOCK_R: tl.constexpr):
    slot = tl.where(part == 0, part_slot, 2 * (part_first + part)).to(tl.int64)
    return partial + slot[:, None] * (KEEP_ROWS * BLOCK_R) + kept * BLOCK_R + d[None, :]
