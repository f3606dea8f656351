"""The extension kernel for Hopper: one producer warpgroup copies pages to shared memory, two consumer warpgroups multiply.

The same work list, formula and merge as `attend_kernel`, in Gluon, which can express the overlap. This file has the buffers and barriers
that the three share. Each consumer has half of a tile of 128 rows.

Serves 16-bit dtypes, the head dims from 64 to 256 that `tiling.in_hopper_kernel` lists (including 192 with 128), and any page size; not
ALiBi and not position biases.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from paged_attn.backends.attention.triton.hopper.consumer import consume, thread_barrier
from paged_attn.backends.attention.triton.hopper.parts import allocate_parts
from paged_attn.backends.attention.triton.hopper.producer import produce


@gluon.jit(do_not_specialize=["table_stride", "window", "chunk"])
def attend_hopper(query, keys, values, out, sinks, lse, page_table, seq_lens, query_start, work, partial, partial_stats, counters,
                  table_stride, page_stride, key_stride, key_head_stride, value_stride, value_head_stride,
                  query_row_stride, query_head_stride, out_row_stride, out_head_stride, lse_row_stride, scale, softcap, window, chunk,
                  KV_HEADS: gl.constexpr, GROUP: gl.constexpr, QK_DIM: gl.constexpr, V_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
                  ROWS: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, CHUNKS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
                  HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
                  STAGES: gl.constexpr, QUERY_TILES: gl.constexpr, TURNS: gl.constexpr, ITEM_COST: gl.constexpr,
                  PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr):  # fmt: skip
    """One layer; grid (programs,), 4 warps (and 8 more of its own). Arguments as in `attend_kernel.attend`; counters [2 * programs]."""
    dtype: gl.constexpr = query.dtype.element_ty
    q_tiles = allocate_parts(dtype, 2 * QUERY_TILES, BLOCK_M // 2, QK_DIM)  # two halves per tile
    k_tiles = allocate_parts(dtype, STAGES, BLOCK_N, QK_DIM)
    v_tiles = allocate_parts(dtype, STAGES, BLOCK_N, V_DIM)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [QUERY_TILES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERY_TILES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=128)
        mbarrier.init(v_full.index(i), count=128)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(QUERY_TILES):
        mbarrier.init(q_full.index(i), count=128)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (consume, (0, query, out, sinks, lse, seq_lens, query_start, work, partial, partial_stats, counters, q_tiles, k_tiles, v_tiles,
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, out_row_stride, out_head_stride, lse_row_stride, scale,
                       softcap, window, chunk, KV_HEADS, GROUP, V_DIM, ROWS, CAUSAL, HAS_WINDOW, CHUNKS, HAS_SOFTCAP, HAS_SINKS,
                       HAS_LSE, BLOCK_M, BLOCK_N, STAGES, QUERY_TILES, TURNS, ITEM_COST)),
            (consume, (1, query, out, sinks, lse, seq_lens, query_start, work, partial, partial_stats, counters, q_tiles, k_tiles, v_tiles,
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, out_row_stride, out_head_stride, lse_row_stride, scale,
                       softcap, window, chunk, KV_HEADS, GROUP, V_DIM, ROWS, CAUSAL, HAS_WINDOW, CHUNKS, HAS_SOFTCAP, HAS_SINKS,
                       HAS_LSE, BLOCK_M, BLOCK_N, STAGES, QUERY_TILES, TURNS, ITEM_COST)),
            (produce, (query, keys, values, page_table, seq_lens, query_start, work, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full,
                       k_empty, v_full, v_empty, query_row_stride, query_head_stride, table_stride, page_stride, key_stride,
                       key_head_stride, value_stride, value_head_stride, window, chunk, KV_HEADS, GROUP, QK_DIM, V_DIM, PAGE_SIZE, ROWS,
                       CAUSAL, HAS_WINDOW, CHUNKS, BLOCK_M, BLOCK_N, STAGES, QUERY_TILES, ITEM_COST)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
