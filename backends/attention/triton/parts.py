"""Partial results of work items split over several programs, and their sum, which the last program computes.

A slot has `acc` [KEEP_ROWS, BLOCK_DV] in `partial`, and `m` and `norm` [KEEP_ROWS] behind each other in `partial_stats`, float32.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

NO_KEY = tl.constexpr(float("-inf"))


@triton.jit
def keep_part(acc, m, norm, partial, partial_stats, slot, mask, KEEP_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Stores the rows [BLOCK_M] of `mask`, all of which are among the first KEEP_ROWS."""
    kept, dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DV)
    tl.store(partial + slot.to(tl.int64) * (KEEP_ROWS * BLOCK_DV) + kept[:, None] * BLOCK_DV + dv[None, :], acc, mask=mask[:, None])
    tl.store(partial_stats + slot * (2 * KEEP_ROWS) + kept, m, mask=mask)
    tl.store(partial_stats + slot * (2 * KEEP_ROWS) + KEEP_ROWS + kept, norm, mask=mask)


@triton.jit
def merge_parts(partial, partial_stats, parts, part_first, part_slot, mask, KEEP_ROWS: tl.constexpr, BLOCK_DV: tl.constexpr,
                MERGE_PARTS: tl.constexpr):  # fmt: skip
    """acc, m and norm of the rows [KEEP_ROWS] of `mask`: part 0 is in `part_slot`, the others in the first slots of the programs after
    `part_first`."""
    rows, dv = tl.arange(0, KEEP_ROWS), tl.arange(0, BLOCK_DV)
    m = tl.full([KEEP_ROWS], NO_KEY, tl.float32)
    norm = tl.zeros([KEEP_ROWS], tl.float32)
    acc = tl.zeros([KEEP_ROWS, BLOCK_DV], tl.float32)
    for p in tl.range(0, parts, MERGE_PARTS):
        # All loads come before all arithmetic, so that they wait for memory together.
        ms, norms, accs = (), (), ()
        for i in tl.static_range(MERGE_PARTS):
            here = mask & (p + i < parts)
            at = tl.where(p + i == 0, part_slot, 2 * (part_first + p + i))
            stats = partial_stats + at * (2 * KEEP_ROWS) + rows
            ms = ms + (tl.load(stats, mask=here, other=NO_KEY, cache_modifier=".cg"),)
            norms = norms + (tl.load(stats + KEEP_ROWS, mask=here, other=0.0, cache_modifier=".cg"),)
            part = partial + at.to(tl.int64) * (KEEP_ROWS * BLOCK_DV) + rows[:, None] * BLOCK_DV + dv[None, :]
            accs = accs + (tl.load(part, mask=here[:, None], other=0.0, cache_modifier=".cg"),)
        m_new = m
        for i in tl.static_range(MERGE_PARTS):
            m_new = tl.maximum(m_new, ms[i])
        shift = tl.where(m_new == NO_KEY, 0.0, m_new)
        alpha = tl.exp2(m - shift)
        norm = norm * alpha
        acc = acc * alpha[:, None]
        for i in tl.static_range(MERGE_PARTS):
            weight = tl.exp2(ms[i] - shift)
            norm += norms[i] * weight
            acc += accs[i] * weight[:, None]
        m = m_new
    return acc, m, norm
