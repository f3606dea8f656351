"""Which requests of a decode step have a tile in common: what their page tables begin with, then what each has besides."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["requests", "table_stride"])
def count_together(page_table, seq_lens, units, tile_ends, ends, requests, table_stride,
                   GROUP: tl.constexpr, MEMBERS: tl.constexpr, SEGMENTS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, ITEM_COST: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Requests in runs of MEMBERS: a run that shares blocks of keys is one item for each KV head, else each request is one.

    `units` and `tile_ends` as `count_units` leaves them, those of a run at its first request; `ends` [requests, SEGMENTS] has for each
    request that an item begins with the running sum of shared blocks, of its own ones, of the next one's own, and so on, the last repeated.
    """
    first, member = tl.program_id(0) * MEMBERS, tl.arange(0, SEGMENTS)
    there = (member < MEMBERS) & (first + member < requests)
    lengths = tl.load(seq_lens + first + member, mask=there, other=0)
    # Pages that may be shared: the new token's is each one's own. A request of one token, as padding has, shares nothing and takes part.
    longer = there & (lengths > 1)
    most = (tl.min(tl.where(longer, lengths, 1 << 30), 0) - 1) // PAGE_SIZE
    most = tl.where((tl.sum(longer.to(tl.int32), 0) < 2) | (tl.sum(tl.where(member == 0, lengths, 0), 0) < 2), 0, most)
    table = page_table + first.to(tl.int64) * table_stride
    common, column = most, most * 0
    while column < common:
        columns = column + tl.arange(0, COLUMNS)
        inside = columns < most
        mine = tl.load(table + columns, mask=inside, other=0)
        theirs = tl.load(table + member[:, None] * table_stride + columns[None], mask=longer[:, None] & inside[None], other=0)
        differs = tl.max((longer[:, None] & inside[None] & (theirs != mine[None])).to(tl.int32), 0)
        common = tl.minimum(common, tl.min(tl.where(differs > 0, columns, most), 0))
        column += COLUMNS
    shared = common * PAGE_SIZE // BLOCK_N
    own = tl.where(there, tl.where(longer, tl.cdiv(lengths - shared * BLOCK_N, BLOCK_N), 1), 0)
    total = shared + tl.sum(own, 0)
    taken = tl.where(shared > 0, tl.where(member == 0, total + ITEM_COST, 0), own + ITEM_COST)
    request = first + member
    tl.store(units + request, taken, mask=there)
    tl.store(tile_ends + (request * GROUP) // BLOCK_M + request, taken, mask=there)
    if shared > 0:
        tl.store(ends + first * SEGMENTS, shared)
        tl.store(ends + first * SEGMENTS + 1 + member, shared + tl.cumsum(own, 0), mask=member < SEGMENTS - 1)
    else:
        tl.store(ends + request[:, None] * SEGMENTS + member[None], tl.where(member[None] > 0, own[:, None], 0), mask=there[:, None])
