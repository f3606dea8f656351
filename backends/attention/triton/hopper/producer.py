"""The Hopper kernel's producer: copies the query tiles, keys and values of a program's items to shared memory, page by page."""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from paged_attn.backends.attention.triton.hopper.parts import copy_layout
from paged_attn.backends.attention.triton.tiles import first_item, next_item, tile_keys


@gluon.jit
def _row_starts(at, WIDTH: gl.constexpr):
    """The starts of rows, found by one thread each, for the threads that copy WIDTH of their columns."""
    return gl.convert_layout(at, gl.SliceLayout(1, copy_layout(WIDTH)))


@gluon.jit
def _copy_rows(tiles, buffer, source, at, first, present):
    """Copies rows at `source + at` to a buffer; rows from `present` on are zeros and not read. `first` is `at` for the first part."""
    _copy_part(tiles[0].index(buffer), source, first, present)
    for part in gl.static_range(1, len(tiles)):
        at_part = _row_starts(at, tiles[part].shape[2])  # not earlier: addresses of all parts need too many registers
        _copy_part(tiles[part].index(buffer), source + tiles[0].shape[2], at_part, present)


@gluon.jit
def _copy_part(tile, source, at, present):
    layout: gl.constexpr = copy_layout(tile.shape[1])
    row = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(tile, source + (at[:, None] + column[None, :]), mask=(row < present)[:, None])


@gluon.jit
def _copy_queries(q_tiles, q_full, q_empty, query, items, tile, kv_head, start, query_len, row_stride, head_stride,
                  GROUP: gl.constexpr, BLOCK_M: gl.constexpr, QUERY_TILES: gl.constexpr, finders: gl.constexpr):  # fmt: skip
    buffer = items % QUERY_TILES
    mbarrier.wait(q_empty.index(buffer), ((items // QUERY_TILES) & 1) ^ 1)
    for half in gl.static_range(2):
        first = tile * BLOCK_M + half * (BLOCK_M // 2)
        flat = first + gl.arange(0, BLOCK_M // 2, layout=finders)
        at = (start + flat // GROUP).to(gl.int64) * row_stride + (kv_head * GROUP + flat % GROUP) * head_stride
        _copy_rows(q_tiles, 2 * buffer + half, query, at, _row_starts(at, q_tiles[0].shape[2]), query_len * GROUP - first)
    async_copy.mbarrier_arrive(q_full.index(buffer), increment_count=False)


@gluon.jit
def _copy_block(k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, count, keys, values, table, page, key, present, high, page_stride,
                key_stride, value_stride, QK_DIM: gl.constexpr, V_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
                STAGES: gl.constexpr):  # fmt: skip
    """Copies the keys and values of a block whose pages are known; returns the pages of the next one."""
    page_at, in_page = page.to(gl.int64) * page_stride, key % PAGE_SIZE
    at = page_at + in_page * key_stride
    first = _row_starts(at, k_tiles[0].shape[2])
    key += BLOCK_N
    page = gl.load(table + key // PAGE_SIZE, mask=key < high, other=0)
    stage = count % STAGES
    phase = (count // STAGES) & 1
    mbarrier.wait(k_empty.index(stage), phase ^ 1)
    _copy_rows(k_tiles, stage, keys, at, first, present)
    async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
    if QK_DIM != V_DIM:
        at = page_at + in_page * value_stride
        first = _row_starts(at, v_tiles[0].shape[2])
    mbarrier.wait(v_empty.index(stage), phase ^ 1)
    _copy_rows(v_tiles, stage, values, at, first, present)
    async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
    return page


@gluon.jit
def produce(query, keys, values, page_table, seq_lens, query_start, work, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
            v_full, v_empty, query_row_stride, query_head_stride, table_stride, page_stride, key_stride, key_head_stride, value_stride,
            value_head_stride, window, chunk,
            KV_HEADS: gl.constexpr, GROUP: gl.constexpr, QK_DIM: gl.constexpr, V_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
            ROWS: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, CHUNKS: gl.constexpr, BLOCK_M: gl.constexpr,
            BLOCK_N: gl.constexpr, STAGES: gl.constexpr, QUERY_TILES: gl.constexpr, ITEM_COST: gl.constexpr):  # fmt: skip
    BEFORE_QUERIES: gl.constexpr = 1 if QUERY_TILES == 1 else 0  # blocks copied before an item's queries
    # One thread finds one key's page; the address goes through shared memory to the threads that copy its 16-byte parts.
    finders: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offset = gl.arange(0, BLOCK_N, layout=finders)
    mine = work + gl.program_id(0) * 16
    request, tile, kv_head, block, left, start, query_len, seq_len = first_item(mine)
    count = 0
    items = 0
    while left > 0:
        if not BEFORE_QUERIES:
            _copy_queries(q_tiles, q_full, q_empty, query, items, tile, kv_head, start, query_len, query_row_stride, query_head_stride,
                          GROUP, BLOCK_M, QUERY_TILES, finders)  # fmt: skip
        _, _, low, high = tile_keys(tile, query_len, seq_len, window, chunk, GROUP, CAUSAL, HAS_WINDOW, CHUNKS, BLOCK_M, BLOCK_N)
        blocks = (high - low + BLOCK_N - 1) // BLOCK_N
        take = gl.minimum(blocks - block, left)
        table = page_table + request.to(gl.int64) * table_stride
        head_keys = keys + kv_head * key_head_stride
        head_values = values + kv_head * value_head_stride
        first_key = low + block * BLOCK_N
        key = first_key + offset
        page = gl.load(table + key // PAGE_SIZE, mask=key < high, other=0)
        if BEFORE_QUERIES:  # the consumers still use the last item's queries; the first block need not wait for that
            page = _copy_block(k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, count, head_keys, head_values, table, page, key,
                               high - first_key, high, page_stride, key_stride, value_stride, QK_DIM, V_DIM, PAGE_SIZE, BLOCK_N,
                               STAGES)  # fmt: skip
            _copy_queries(q_tiles, q_full, q_empty, query, items, tile, kv_head, start, query_len, query_row_stride, query_head_stride,
                          GROUP, BLOCK_M, QUERY_TILES, finders)  # fmt: skip
            first_key += BLOCK_N
            key += BLOCK_N
            count += 1
        for _ in range(take - BEFORE_QUERIES):
            page = _copy_block(k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, count, head_keys, head_values, table, page, key,
                               high - first_key, high, page_stride, key_stride, value_stride, QK_DIM, V_DIM, PAGE_SIZE, BLOCK_N,
                               STAGES)  # fmt: skip
            first_key += BLOCK_N
            key += BLOCK_N
            count += 1
        left -= take + ITEM_COST
        items += 1
        block = 0
        request, tile, kv_head, start, query_len, seq_len = next_item(request, tile, kv_head, start, query_len, seq_len, left, query_start,
                                                                      seq_lens, KV_HEADS, GROUP, ROWS, BLOCK_M)  # fmt: skip
