"""Copies the queries and rows of a program's items to shared memory, page by page; see `hopper_kernel.py`."""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from paged_attn.backends.attention.triton.hopper.parts import copy_layout
from paged_attn.backends.attention.triton.tiles import first_item, next_item, tile_keys


@gluon.jit
def _copy_part(tile, source, at, present):
    """Copies a part of rows that start at `source + at`; rows from `present` on are zeros and not read."""
    layout: gl.constexpr = copy_layout(tile.shape[1])
    row = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, layout))
    # The pointer comes first: offsets of rows and columns would be computed ahead of the loop and need too many registers.
    async_copy.async_copy_global_to_shared(tile, (source + at)[:, None] + column[None, :], mask=(row < present)[:, None])


@gluon.jit
def _copy_rows(tiles, buffer, source, at, present):
    """Copies rows that start at `source + at`, found by one thread each, with threads that copy 16-byte parts."""
    column = 0
    for part in gl.static_range(len(tiles)):
        mine = gl.convert_layout(at, gl.SliceLayout(1, copy_layout(tiles[part].shape[2])))
        _copy_part(tiles[part].index(buffer), source + column, mine, present)
        column += tiles[part].shape[2]


@gluon.jit
def _copy_adjacent(tiles, buffer, source, present, STRIDE: gl.constexpr):
    """Copies rows from `source` on, STRIDE elements apart."""
    column = 0
    for part in gl.static_range(len(tiles)):
        row = gl.arange(0, tiles[part].shape[1], layout=gl.SliceLayout(1, copy_layout(tiles[part].shape[2])))
        _copy_part(tiles[part].index(buffer), source + column, row * STRIDE, present)
        column += tiles[part].shape[2]


@gluon.jit
def _copy_queries(q_tiles, q_full, q_empty, query, items, tile, start, query_len, row_stride, head_stride, GROUP: gl.constexpr,
                  BLOCK_M: gl.constexpr, finders: gl.constexpr):  # fmt: skip
    mbarrier.wait(q_empty.index(0), (items & 1) ^ 1)
    flat = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=finders)
    at = (start + flat // GROUP).to(gl.int64) * row_stride + flat % GROUP * head_stride
    _copy_rows(q_tiles, 0, query, at, query_len * GROUP - tile * BLOCK_M)
    async_copy.mbarrier_arrive(q_full.index(0), increment_count=False)


@gluon.jit
def _copy_block(k_tiles, k_full, k_empty, count, rows, table, page, key, high, page_stride, TOKEN_STRIDE: gl.constexpr,
                PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, finders: gl.constexpr):  # fmt: skip
    """Copies the rows from `key` on, whose pages are known; returns the pages of the next block."""
    stage = count % STAGES
    if PAGE_SIZE % BLOCK_N == 0:  # one page
        source = rows + (page.to(gl.int64) * page_stride + key % PAGE_SIZE * TOKEN_STRIDE)
        page = _pages(table, key + BLOCK_N, high, PAGE_SIZE, BLOCK_N, finders)
        mbarrier.wait(k_empty.index(stage), ((count // STAGES) & 1) ^ 1)
        _copy_adjacent(k_tiles, stage, source, high - key, TOKEN_STRIDE)
    else:
        each = key + gl.arange(0, BLOCK_N, layout=finders)
        at = page.to(gl.int64) * page_stride + each % PAGE_SIZE * TOKEN_STRIDE
        page = _pages(table, key + BLOCK_N, high, PAGE_SIZE, BLOCK_N, finders)
        mbarrier.wait(k_empty.index(stage), ((count // STAGES) & 1) ^ 1)
        _copy_rows(k_tiles, stage, rows, at, high - key)
    async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
    return page


@gluon.jit
def _pages(table, key, high, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, finders: gl.constexpr):
    """The page of a block from `key` on, or of each of its tokens if it may span several."""
    if PAGE_SIZE % BLOCK_N == 0:
        return gl.load(table + key // PAGE_SIZE, mask=key < high, other=0)
    else:
        each = key + gl.arange(0, BLOCK_N, layout=finders)
        return gl.load(table + each // PAGE_SIZE, mask=each < high, other=0)


@gluon.jit
def produce(query, rows, page_table, seq_lens, query_start, work, q_tiles, k_tiles, q_full, q_empty, k_full, k_empty, query_row_stride,
            query_head_stride, table_stride, page_stride,
            TOKEN_STRIDE: gl.constexpr, GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr,
            BLOCK_N: gl.constexpr, STAGES: gl.constexpr, ITEM_COST: gl.constexpr):  # fmt: skip
    finders: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    request, tile, kv_head, block, left, start, query_len, seq_len = first_item(work + gl.program_id(0) * 16)
    count = 0
    items = 0
    while left > 0:
        _, _, _, high = tile_keys(tile, query_len, seq_len, 0, 0, GROUP, True, False, "none", BLOCK_M, 0)
        blocks = (high + BLOCK_N - 1) // BLOCK_N
        take = gl.minimum(blocks - block, left)
        table = page_table + request.to(gl.int64) * table_stride
        key = block * BLOCK_N
        page = _pages(table, key, high, PAGE_SIZE, BLOCK_N, finders)
        # The last item's queries are still in use; the first block need not wait for them.
        page = _copy_block(k_tiles, k_full, k_empty, count, rows, table, page, key, high, page_stride, TOKEN_STRIDE, PAGE_SIZE, BLOCK_N,
                           STAGES, finders)  # fmt: skip
        _copy_queries(q_tiles, q_full, q_empty, query, items, tile, start, query_len, query_row_stride, query_head_stride, GROUP, BLOCK_M,
                      finders)  # fmt: skip
        count += 1
        for i in range(1, take):
            page = _copy_block(k_tiles, k_full, k_empty, count, rows, table, page, key + i * BLOCK_N, high, page_stride, TOKEN_STRIDE,
                               PAGE_SIZE, BLOCK_N, STAGES, finders)  # fmt: skip
            count += 1
        left -= take + ITEM_COST
        items += 1
        block = 0
        request, tile, kv_head, start, query_len, seq_len = next_item(request, tile, kv_head, start, query_len, seq_len, left, query_start,
                                                                      seq_lens, 1, GROUP, ROWS, BLOCK_M)  # fmt: skip
