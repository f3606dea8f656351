"""The extension kernel for Hopper: one producer warpgroup copies pages to shared memory, two consumer warpgroups multiply.

The same work list, the same formula and the same merge as `attend_kernel`, in Gluon, where the overlap can be written down; here are the
buffers and barriers that the three share. Each consumer has half of a tile of 128 rows.

Serves dtypes of 16 bits with equal head dims of 64 or 128, any page size; not ALiBi and not position biases.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from paged_attn.backends.attention.triton.hopper_consumer import consume, thread_barrier
from paged_attn.backends.attention.triton.hopper_producer import produce


@gluon.jit(do_not_specialize=["table_stride", "window", "chunk"])
def attend_hopper(query, keys, values, out, sinks, lse, page_table, seq_lens, query_start, work, partial, partial_stats, counters,
                  table_stride, page_stride, token_stride, head_stride,
                  query_row_stride, query_head_stride, out_row_stride, out_head_stride, lse_row_stride, scale, softcap, window, chunk,
                  KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, ROWS: gl.constexpr,
                  CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_CHUNK: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
                  HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
                  STAGES: gl.constexpr, TURNS: gl.constexpr, ITEM_COST: gl.constexpr,
                  PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr):  # fmt: skip
    """One layer; grid (programs,), 4 warps (and 8 more of its own). Arguments as in `attend_kernel.attend`; counters [2 * programs]."""
    dtype: gl.constexpr = query.dtype.element_ty
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M // 2, DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [4, BLOCK_M // 2, DIM], q_layout)  # two tiles of two halves
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], kv_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], kv_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=128)
        mbarrier.init(v_full.index(i), count=128)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=128)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (consume, (0, query, out, sinks, lse, seq_lens, query_start, work, partial, partial_stats, counters, q_smem, k_smem, v_smem,
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, out_row_stride, out_head_stride, lse_row_stride, scale,
                       softcap, window, chunk, KV_HEADS, GROUP, DIM, ROWS, CAUSAL, HAS_WINDOW, HAS_CHUNK, HAS_SOFTCAP, HAS_SINKS,
                       HAS_LSE, BLOCK_M, BLOCK_N, STAGES, TURNS, ITEM_COST)),
            (consume, (1, query, out, sinks, lse, seq_lens, query_start, work, partial, partial_stats, counters, q_smem, k_smem, v_smem,
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, out_row_stride, out_head_stride, lse_row_stride, scale,
                       softcap, window, chunk, KV_HEADS, GROUP, DIM, ROWS, CAUSAL, HAS_WINDOW, HAS_CHUNK, HAS_SOFTCAP, HAS_SINKS,
                       HAS_LSE, BLOCK_M, BLOCK_N, STAGES, TURNS, ITEM_COST)),
            (produce, (query, keys, values, page_table, seq_lens, query_start, work, q_smem, k_smem, v_smem, q_full, q_empty, k_full,
                       k_empty, v_full, v_empty, query_row_stride, query_head_stride, table_stride, page_stride, token_stride,
                       head_stride, window, chunk, KV_HEADS, GROUP, DIM, PAGE_SIZE, ROWS, CAUSAL, HAS_WINDOW, HAS_CHUNK, BLOCK_M,
                       BLOCK_N, STAGES, ITEM_COST)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
