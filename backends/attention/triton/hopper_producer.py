"""The Hopper kernel's producer: copies the query tiles, keys and values of a program's items to shared memory, page by page."""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from paged_attn.backends.attention.triton.tiles import first_item, next_item, tile_keys


@gluon.jit
def produce(query, keys, values, page_table, seq_lens, query_start, work, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
            v_full, v_empty, query_row_stride, query_head_stride, table_stride, page_stride, token_stride, head_stride, window, chunk,
            KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, ROWS: gl.constexpr,
            CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_CHUNK: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
            STAGES: gl.constexpr, ITEM_COST: gl.constexpr):  # fmt: skip
    # One thread finds one key's page; shared memory hands the address to the threads that copy its 16-byte parts.
    LANES: gl.constexpr = DIM // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    finders: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offset = gl.arange(0, BLOCK_N, layout=finders)
    row_offset = gl.arange(0, BLOCK_M // 2, layout=finders)
    copied_row = gl.arange(0, BLOCK_M // 2, layout=rows)
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    mine = work + gl.program_id(0) * 16
    request, tile, kv_head, block, left, start, query_len, seq_len = first_item(mine)
    count = 0
    items = 0
    while left > 0:
        buffer = items % 2
        mbarrier.wait(q_empty.index(buffer), ((items // 2) & 1) ^ 1)
        for half in gl.static_range(2):
            flat = tile * BLOCK_M + half * (BLOCK_M // 2) + row_offset
            q_at = (start + flat // GROUP).to(gl.int64) * query_row_stride + (kv_head * GROUP + flat % GROUP) * query_head_stride
            q_there = (tile * BLOCK_M + half * (BLOCK_M // 2) + copied_row < query_len * GROUP)[:, None]
            q_at = gl.convert_layout(q_at, rows)[:, None] + d[None, :]
            async_copy.async_copy_global_to_shared(q_smem.index(2 * buffer + half), query + q_at, mask=q_there)
        async_copy.mbarrier_arrive(q_full.index(buffer), increment_count=False)
        _, _, low, high = tile_keys(tile, query_len, seq_len, window, chunk, GROUP, CAUSAL, HAS_WINDOW, HAS_CHUNK, BLOCK_M, BLOCK_N)
        blocks = (high - low + BLOCK_N - 1) // BLOCK_N
        take = gl.minimum(blocks - block, left)
        table = page_table + request.to(gl.int64) * table_stride
        head_keys = keys + kv_head * head_stride
        head_values = values + kv_head * head_stride
        key = low + block * BLOCK_N + offset
        page = gl.load(table + key // PAGE_SIZE, mask=key < high, other=0)
        copied = low + block * BLOCK_N + gl.arange(0, BLOCK_N, layout=rows)
        for _ in range(take):
            at = gl.convert_layout(page.to(gl.int64) * page_stride + (key % PAGE_SIZE) * token_stride, rows)[:, None] + d[None, :]
            there = (copied < high)[:, None]
            copied += BLOCK_N
            key += BLOCK_N
            page = gl.load(table + key // PAGE_SIZE, mask=key < high, other=0)
            stage = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            async_copy.async_copy_global_to_shared(k_smem.index(stage), head_keys + at, mask=there)
            async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            async_copy.async_copy_global_to_shared(v_smem.index(stage), head_values + at, mask=there)
            async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
            count += 1
        left -= take + ITEM_COST
        items += 1
        block = 0
        request, tile, kv_head, start, query_len, seq_len = next_item(request, tile, kv_head, start, query_len, seq_len, left, query_start,
                                                                      seq_lens, KV_HEADS, GROUP, ROWS, BLOCK_M)  # fmt: skip
