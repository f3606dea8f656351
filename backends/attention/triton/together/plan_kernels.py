"""The keys of a tile of requests that decode: what their page tables have in common, then what each has besides."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["requests", "table_stride"])
def count_together(page_table, seq_lens, units, tile_ends, ends, requests, table_stride,
                   GROUP: tl.constexpr, MEMBERS: tl.constexpr, SEGMENTS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, ITEM_COST: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Of a tile of MEMBERS requests: `ends` [tiles, SEGMENTS], the running sum of blocks of shared keys, then of each request's own, which
    SEGMENTS - 1 >= MEMBERS repeat at the end; `units` and `tile_ends` as `deal_work` reads them, for tiles in the place of requests."""
    tile = tl.program_id(0)
    first, member = tile * MEMBERS, tl.arange(0, SEGMENTS)
    there = (member < MEMBERS) & (first + member < requests)
    lengths = tl.load(seq_lens + first + member, mask=there, other=0)
    most = (tl.min(tl.where(there, lengths, 1 << 30), 0) - 1) // PAGE_SIZE  # pages: the new token's is each one's own
    alone = tl.sum(there.to(tl.int32), 0) < 2
    most = tl.where(alone, 0, most)
    table = page_table + first.to(tl.int64) * table_stride
    common, column = most, most * 0
    while column < common:
        columns = column + tl.arange(0, COLUMNS)
        inside = columns < most
        mine = tl.load(table + columns, mask=inside, other=0)
        theirs = tl.load(table + member[:, None] * table_stride + columns[None], mask=there[:, None] & inside[None], other=0)
        differs = tl.max((there[:, None] & inside[None] & (theirs != mine[None])).to(tl.int32), 0)
        common = tl.minimum(common, tl.min(tl.where(differs > 0, columns, most), 0))
        column += COLUMNS
    shared = common * PAGE_SIZE // BLOCK_N
    own = tl.where(there, tl.cdiv(lengths - shared * BLOCK_N, BLOCK_N), 0)
    running = shared + tl.cumsum(own, 0)
    tl.store(ends + tile * SEGMENTS + 1 + member, running, mask=member < SEGMENTS - 1)
    tl.store(ends + tile * SEGMENTS, shared)
    total = shared + tl.sum(own, 0) + ITEM_COST
    tl.store(units + tile, total)
    tl.store(tile_ends + (tile * GROUP) // BLOCK_M + tile, total)
