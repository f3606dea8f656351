"""Plans which requests of a decode step share a tile: first the pages that they share, then each one's own."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["requests", "table_stride"])
def count_together(page_table, seq_lens, units, tile_ends, ends, requests, table_stride,
                   GROUP: tl.constexpr, MEMBERS: tl.constexpr, SEGMENTS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, ITEM_COST: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Groups requests into runs of MEMBERS, cut into items where one shares no block of keys with the one before it.

    `units` and `tile_ends` are those of `count_units`: an item's at its first request, zeros at the others. `ends` [requests, SEGMENTS]
    has there the running sum of its blocks: those that all share, the first one's own, the second one's, .., the last repeated
    up to column MEMBERS; then, in the last column, the number of its requests.
    """
    first, member = tl.program_id(0) * MEMBERS, tl.arange(0, SEGMENTS)
    there = (member < MEMBERS) & (first + member < requests)
    lengths = tl.load(seq_lens + first + member, mask=there, other=0)
    before = tl.load(seq_lens + first + member - 1, mask=there & (member > 0), other=0)
    most = tl.maximum(tl.minimum(lengths, before) - 1, 0) // PAGE_SIZE  # the page of the new token is never shared
    table = page_table + (first + member).to(tl.int64)[:, None] * table_stride
    common, column, furthest = most, 0, tl.max(most, 0)  # pages that a request shares with the one before it
    while column < furthest:
        columns = column + tl.arange(0, COLUMNS)[None]
        inside = columns < common[:, None]
        differs = tl.load(table + columns, mask=inside, other=0) != tl.load(table - table_stride + columns, mask=inside, other=0)
        common = tl.min(tl.where(differs, columns, common[:, None]), 1)
        column += COLUMNS
        furthest = tl.max(tl.where(common >= column, most, 0), 0)
    blocks = common * PAGE_SIZE // BLOCK_N
    begins = blocks == 0
    item = tl.cumsum(begins.to(tl.int32), 0)
    shared, count = member * 0 + (1 << 30), member * 0
    for each in tl.static_range(MEMBERS):
        one = member == each
        same = item == tl.sum(tl.where(one, item, 0), 0)
        common_blocks = tl.sum(tl.where(one, blocks, 0), 0)
        shared = tl.where(same & (common_blocks > 0), tl.minimum(shared, common_blocks), shared)
        count += tl.where(same, tl.sum(tl.where(one & there, 1, 0), 0), 0)
    shared = tl.where(count > 1, shared, 0)
    own = tl.where(there, tl.cdiv(lengths - shared * BLOCK_N, BLOCK_N), 0)
    segment = member[None]  # segment of an item, numbered by its first request
    running = shared[:, None] + segment * 0
    for each in tl.static_range(MEMBERS):
        one = member == each
        same = item == tl.sum(tl.where(one, item, 0), 0)
        counts = same[:, None] & (each < member[:, None] + segment) & (each >= member[:, None])
        running += tl.where(counts, tl.sum(tl.where(one, own, 0), 0), 0)
    taken = tl.where(begins, tl.max(running, 1) + ITEM_COST, 0)
    request = first + member
    tl.store(units + request, taken, mask=there)
    tl.store(tile_ends + (request * GROUP) // BLOCK_M + request, taken, mask=there)
    tl.store(ends + request[:, None] * SEGMENTS + segment, tl.where(segment < SEGMENTS - 1, running, count[:, None]), mask=there[:, None])
