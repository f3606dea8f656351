"""Cuts decode steps into equal shares in one launch: what `count_units` and `deal_work` find where each request has one tile.

Such a tile's blocks follow from the request's length alone, so every program counts all requests' blocks itself. Nearly everything is an
argument, so that there are few kernels to compile.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.attention.triton.plan_kernels import store_rows
from paged_attn.backends.attention.triton.tiles import is_chosen, tile_keys


@triton.jit
def _blocks(request, requests, seq_lens, query_start, window, chunk, block_n, item_cost, CHUNKS: tl.constexpr):
    """query_start and seq_len of requests, and the blocks of one KV head; 0 if a request has not one new token."""
    there = request < requests
    start = tl.load(query_start + request, mask=there, other=0)
    query_len = tl.load(query_start + request + 1, mask=there, other=0) - start
    seq_len = tl.load(seq_lens + request, mask=there, other=1)
    # With one query, the first key and the last one are the same for any group and tile, and with a causal mask or without.
    _, _, low, high = tile_keys(request * 0, 1, seq_len, window, chunk, 1, True, True, CHUNKS, 1, 0)
    return start, seq_len, tl.where(there & is_chosen(query_len, "one"), tl.cdiv(high - low, block_n) + item_cost, 0)


_OF_A_KIND = ["programs", "window", "chunk", "block_n", "item_cost", "kv_heads"]


@triton.jit(do_not_specialize=["requests", *_OF_A_KIND, *(f"{name}_2" for name in _OF_A_KIND)])
def deal_decodes(seq_lens, query_start, requests, work, counters, programs, window, chunk, block_n, item_cost, kv_heads,
                 work_2, counters_2, programs_2, window_2, chunk_2, block_n_2, item_cost_2, kv_heads_2,
                 CHUNKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """`work` and zeroed `counters` of one kind of layers, or of two; see `plan_kernels.py`. Grid (cdiv(programs + 1, BLOCK_P), kinds).

    A kind without a window has one that is longer than any request.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    second = tl.program_id(1) == 1  # chosen like this, and not in two branches, which would be twice the code to load in each step
    work, counters = tl.where(second, work_2, work), tl.where(second, counters_2, counters)
    programs, kv_heads = tl.where(second, programs_2, programs), tl.where(second, kv_heads_2, kv_heads)
    window, chunk = tl.where(second, window_2, window), tl.where(second, chunk_2, chunk)
    block_n, item_cost = tl.where(second, block_n_2, block_n), tl.where(second, item_cost_2, item_cost)

    program = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    total = 0
    for r in tl.range(0, requests, BLOCK_R):
        _, _, blocks = _blocks(r + tl.arange(0, BLOCK_R), requests, seq_lens, query_start, window, chunk, block_n, item_cost, CHUNKS)
        total += kv_heads * tl.sum(blocks, 0)
    share = tl.maximum(tl.cdiv(total, programs), 1)
    begin = program * share
    active = (begin < total) & (program < programs)

    request = tl.zeros([BLOCK_P], tl.int32)  # number of requests that end at or before `begin`
    before = tl.zeros([BLOCK_P], tl.int32)
    running = 0
    for r in tl.range(0, requests, BLOCK_R):
        index = r + tl.arange(0, BLOCK_R)
        _, _, blocks = _blocks(index, requests, seq_lens, query_start, window, chunk, block_n, item_cost, CHUNKS)
        count = kv_heads * blocks
        end = running + tl.cumsum(count, 0)
        passed = (end[None, :] <= begin[:, None]) & (index < requests)[None, :]
        request += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, end[None, :], 0), 1))
        running += tl.sum(count, 0)
    request = tl.where(active, request, 0)

    start, seq_len, blocks = _blocks(request, requests, seq_lens, query_start, window, chunk, block_n, item_cost, CHUNKS)
    blocks = tl.maximum(blocks, 1)
    head = tl.where(active, (begin - before) // blocks, 0)
    unit = begin - before - head * blocks
    origin = begin - unit
    first_program = (origin + item_cost) // share
    taken = tl.minimum(share, total - begin) - tl.maximum(item_cost - unit, 0)
    slot = 2 * first_program + (first_program * share < origin).to(tl.int32)
    store_rows(work, counters, program, programs, request, program * 0, head, tl.maximum(unit - item_cost, 0), tl.where(active, taken, 0),
               first_program, (origin + blocks - 1) // share, slot, start, program * 0 + 1, seq_len)  # fmt: skip
