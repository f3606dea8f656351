"""Join the parts of the items that `attend_latent` cut: as many programs for each item as it has groups of rows.

In the kernel of the room above the program that adds an item's last part merges all of them. Here one KV head serves all query heads, so
one request of a decode step is one or two items for all programs: there would be a hundred parts, of up to 128 KiB, for a single program.

A cut item is the first one of the program that has its last part, so the programs' rows of `work` name each cut item once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.attention.triton.tiles import first_item

LOG2E = tl.constexpr(1.4426950408889634)
NO_KEY = tl.constexpr(float("-inf"))


@triton.jit
def merge_latent(out, lse, work, partial, partial_stats, out_row_stride, out_head_stride, lse_row_stride,
                 GROUP: tl.constexpr, RANK: tl.constexpr, HAS_LSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
                 KEEP_ROWS: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr):  # fmt: skip
    """Grid (programs, KEEP_ROWS / MERGE_ROWS); MERGE_PARTS: loaded at once. Tensors as in `attend_latent`."""
    program = tl.program_id(0)
    mine = work + program * 16
    _, tile, _, _, left, start, query_len, _ = first_item(mine)
    part_first = tl.load(mine + 5)
    part_last = tl.load(mine + 6)
    part_slot = tl.load(mine + 7)
    d = tl.arange(0, BLOCK_R)
    kept = tl.program_id(1) * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    flat = tile * BLOCK_M + kept
    row_mask = flat < query_len * GROUP
    if left > 0 and part_last == program and part_first < program:
        parts = part_last - part_first + 1
        m = tl.full([MERGE_ROWS], NO_KEY, tl.float32)
        norm = tl.zeros([MERGE_ROWS], tl.float32)
        acc = tl.zeros([MERGE_ROWS, BLOCK_R], tl.float32)
        for p in tl.range(0, parts, MERGE_PARTS):
            # All loads before all arithmetic, so that they wait for memory together.
            ms = ()
            norms = ()
            accs = ()
            for i in tl.static_range(MERGE_PARTS):
                here = row_mask & (p + i < parts)
                at = tl.where(p + i == 0, part_slot, 2 * (part_first + p + i))
                stats = partial_stats + at * (2 * KEEP_ROWS) + kept
                ms = ms + (tl.load(stats, mask=here, other=NO_KEY),)
                norms = norms + (tl.load(stats + KEEP_ROWS, mask=here, other=0.0),)
                part = partial + at.to(tl.int64) * (KEEP_ROWS * BLOCK_R) + kept[:, None] * BLOCK_R + d[None, :]
                accs = accs + (tl.load(part, mask=here[:, None], other=0.0),)
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
        row = start + flat // GROUP
        head = flat % GROUP
        result = (acc / norm[:, None]).to(out.dtype.element_ty)
        out_at = out + (row.to(tl.int64) * out_row_stride + head * out_head_stride)[:, None] + d[None, :]
        tl.store(out_at, result, mask=row_mask[:, None] & (d < RANK)[None, :])
        if HAS_LSE:
            tl.store(lse + row.to(tl.int64) * lse_row_stride + head, (m + tl.log2(norm)) / LOG2E, mask=row_mask)
