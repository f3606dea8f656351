"""Cuts a step's attention into equal shares, on the device: stream-K over query tiles and key blocks.

The work of one layer is a list of items (request, KV head, query tile), each with a number of key blocks. All blocks are laid end to end,
and each program gets an equal run of them. A run may cut items. So every program has the same work, whatever the lengths. At most two of
its items are cut, so the workspace for partial results grows with the programs and not with the batch. An item counts as ITEM_COST blocks
more than it has, for its queries and its output: with many short requests these take most of the time.
(Stream-K: Osama et al., 2023, https://arxiv.org/abs/2301.03598, there for matrix products.)

With PART_BLOCKS > 0 an item is cut every PART_BLOCKS blocks instead, whatever else is in the batch. Each part has a program of its own.
Then a row's result is bitwise the same in every batch.

`count_units` runs once per request, `deal_work` once per BLOCK_P programs. A program begins with one look-up, of its row of `work`
[programs + 1, 16] int32:

    0 request, 1 tile, 2 KV head and 3 block where its run begins; 4 blocks of the run
    5 first and 6 last program that has a part of the run's first item; 7 slot of that item's first part
    8 query_start, 9 query_len and 10 seq_len of the request; the rest is padding
"""

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.attention.triton.tiles import is_chosen, tile_keys

WORK_COLUMNS = 16


@triton.jit(do_not_specialize=["window", "chunk"])
def count_units(seq_lens, query_start, units, tile_ends, window, chunk,
                ROWS: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKS: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, PART_BLOCKS: tl.constexpr,
                ITEM_COST: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """units [requests]: blocks (or parts) of one KV head; tile_ends: their running sum over the request's tiles, from `first_tile` on."""
    request = tl.program_id(0)
    start = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    tiles = tl.where(is_chosen(query_len, ROWS), tl.cdiv(query_len * GROUP, BLOCK_M), 0)
    ends = tile_ends + (start * GROUP) // BLOCK_M + request
    total = 0
    for t in tl.range(0, tiles, BLOCK_T):
        tile = t + tl.arange(0, BLOCK_T)
        _, _, low, high = tile_keys(tile, query_len, seq_len, window, chunk, GROUP, CAUSAL, HAS_WINDOW, CHUNKS, BLOCK_M, ALIGN)
        count = tl.cdiv(high - low, BLOCK_N)
        count = tl.cdiv(count, PART_BLOCKS) if PART_BLOCKS > 0 else count + ITEM_COST
        count = tl.where(tile < tiles, count, 0)
        tl.store(ends + tile, total + tl.cumsum(count, 0), mask=tile < tiles)
        total += tl.sum(count, 0)
    tl.store(units + request, total)


@triton.jit(do_not_specialize=["requests", "programs", "window", "chunk", "search_steps"])
def deal_work(seq_lens, query_start, units, tile_ends, work, counters, requests, programs, window, chunk, search_steps,
              GROUP: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, PART_BLOCKS: tl.constexpr, ITEM_COST: tl.constexpr,
              KV_HEADS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """Where each program starts and how many blocks it gets; also zeroes `counters` [2 * programs]."""
    program = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    total = 0
    for r in tl.range(0, requests, BLOCK_R):
        request = r + tl.arange(0, BLOCK_R)
        total += KV_HEADS * tl.sum(tl.load(units + request, mask=request < requests, other=0), 0)
    share = 1
    if PART_BLOCKS == 0:
        share = tl.maximum(tl.cdiv(total, programs), 1)
    begin = program * share
    active = (begin < total) & (program < programs)

    request = tl.zeros([BLOCK_P], tl.int32)  # number of requests that end at or before `begin`
    before = tl.zeros([BLOCK_P], tl.int32)
    running = 0
    for r in tl.range(0, requests, BLOCK_R):
        index = r + tl.arange(0, BLOCK_R)
        count = KV_HEADS * tl.load(units + index, mask=index < requests, other=0)
        end = running + tl.cumsum(count, 0)
        passed = (end[None, :] <= begin[:, None]) & (index < requests)[None, :]
        request += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, end[None, :], 0), 1))
        running += tl.sum(count, 0)
    request = tl.where(active, request, 0)

    start = tl.load(query_start + request, mask=active, other=0)
    query_len = tl.load(query_start + request + 1, mask=active, other=1) - start
    seq_len = tl.load(seq_lens + request, mask=active, other=1)
    per_head = tl.maximum(tl.load(units + request, mask=active, other=1), 1)
    head = (begin - before) // per_head
    unit = (begin - before) % per_head
    ends = tile_ends + (start * GROUP) // BLOCK_M + request
    low_tile = tl.zeros([BLOCK_P], tl.int32)  # the first tile that ends after `unit`
    high_tile = tl.cdiv(query_len * GROUP, BLOCK_M) - 1
    for _ in tl.range(0, search_steps):
        middle = (low_tile + high_tile) // 2
        ended = tl.load(ends + middle, mask=active, other=0) <= unit
        low_tile = tl.where(ended, tl.minimum(middle + 1, high_tile), low_tile)
        high_tile = tl.where(ended, high_tile, middle)
    tile = low_tile
    earlier = tl.load(ends + tile - 1, mask=active & (tile > 0), other=0)
    in_tile = tl.load(ends + tile, mask=active, other=1) - earlier
    unit -= earlier
    _, _, low, high = tile_keys(tile, query_len, seq_len, window, chunk, GROUP, CAUSAL, HAS_WINDOW, CHUNKS, BLOCK_M, ALIGN)
    if PART_BLOCKS == 0:
        origin = begin - unit
        block = tl.maximum(unit - ITEM_COST, 0)
        blocks = tl.minimum(share, total - begin) - tl.maximum(ITEM_COST - unit, 0)
        first_program = (origin + ITEM_COST) // share
        last_program = (origin + in_tile - 1) // share
        slot = 2 * first_program + (first_program * share < origin).to(tl.int32)
    else:
        block = unit * PART_BLOCKS
        blocks = tl.minimum(PART_BLOCKS, tl.cdiv(high - low, BLOCK_N) - block)
        first_program = program - unit
        last_program = first_program + in_tile - 1
        slot = 2 * first_program
    store_rows(work, counters, program, programs, request, tile, head, block, tl.where(active, blocks, 0), first_program, last_program,
               slot, start, query_len, seq_len)  # fmt: skip


@triton.jit
def store_rows(work, counters, program, programs, request, tile, head, block, blocks, first_program, last_program, slot, start, query_len,
               seq_len):  # fmt: skip
    """Rows of `work` from `program` [BLOCK_P] on, and zeros for their counters."""
    row = work + program * 16
    inside = program <= programs
    tl.store(row, request, mask=inside)
    tl.store(row + 1, tile, mask=inside)
    tl.store(row + 2, head, mask=inside)
    tl.store(row + 3, block, mask=inside)
    tl.store(row + 4, blocks, mask=inside)
    tl.store(row + 5, first_program, mask=inside)
    tl.store(row + 6, last_program, mask=inside)
    tl.store(row + 7, slot, mask=inside)
    tl.store(row + 8, start, mask=inside)
    tl.store(row + 9, query_len, mask=inside)
    tl.store(row + 10, seq_len, mask=inside)
    tl.store(counters + program, program * 0, mask=program < programs)
    tl.store(counters + programs + program, program * 0, mask=program < programs)
