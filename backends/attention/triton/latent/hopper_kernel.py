"""Latent attention on Hopper, in Gluon: four warp groups, so that loads, scores, softmax and weighted sums of different blocks overlap.

One group copies rows from their pages (`hopper_producer.py`), one makes weights of scores (`hopper_weights.py`), and two add up latents,
half of the columns each (`hopper_sums.py`), because sums of 64 rows over a rank of 512 are half of a multiprocessor's registers. Queries of
64 rows and two blocks of 64 tokens are 216 KiB of shared memory, so a block's weights take the place of its rotated parts, which the scores
are done with. Fewer than 64 rows are filled up with zeros: memory is the limit then, and the matrix units wait for it anyway.

Arguments, work list and what is left for `merge_latent`: as in `attend_kernel.py`. Serves 16 bits and what `tiling.in_latent_hopper` lists.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from paged_attn.backends.attention.triton.hopper.consumer import thread_barrier
from paged_attn.backends.attention.triton.latent.hopper_producer import produce
from paged_attn.backends.attention.triton.latent.hopper_sums import add_up
from paged_attn.backends.attention.triton.latent.hopper_weights import weigh


@gluon.constexpr_function
def vector_layout():
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.jit
def allocate_rows(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, RANK: gl.constexpr, ROTATED: gl.constexpr):
    """Rows of latents as three tiles: both halves of the latent, and the rotated part."""
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, RANK // 2], dtype)
    rest: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROTATED], dtype)
    first = gl.allocate_shared_memory(dtype, [COUNT, ROWS, RANK // 2], half)
    second = gl.allocate_shared_memory(dtype, [COUNT, ROWS, RANK // 2], half)
    return (first, second, gl.allocate_shared_memory(dtype, [COUNT, ROWS, ROTATED], rest))


@gluon.jit(do_not_specialize=["table_stride"])
def attend_latent_hopper(query, rows, out, lse, page_table, seq_lens, query_start, work, partial, partial_stats, table_stride, page_stride,
                         query_row_stride, query_head_stride, out_row_stride, out_head_stride, lse_row_stride, scale,
                         GROUP: gl.constexpr, RANK: gl.constexpr, ROTATED: gl.constexpr, PAGE_SIZE: gl.constexpr,
                         TOKEN_STRIDE: gl.constexpr, ROWS: gl.constexpr, HAS_LSE: gl.constexpr, BLOCK_M: gl.constexpr,
                         BLOCK_N: gl.constexpr, STAGES: gl.constexpr, KEEP_ROWS: gl.constexpr, ITEM_COST: gl.constexpr,
                         SUM_REGISTERS: gl.constexpr, WEIGHT_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr):  # fmt: skip
    """One layer; grid (programs,), 4 warps (and 12 more of its own)."""
    dtype: gl.constexpr = rows.dtype.element_ty
    q_tiles = allocate_rows(dtype, 1, BLOCK_M, RANK, ROTATED)
    k_tiles = allocate_rows(dtype, STAGES, BLOCK_N, RANK, ROTATED)
    alphas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], vector_layout())
    norms = gl.allocate_shared_memory(gl.float32, [1, BLOCK_M], vector_layout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    norm_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    norm_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=128)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(p_full.index(i), count=1)
    mbarrier.init(q_full.index(0), count=128)
    mbarrier.init(q_empty.index(0), count=1)
    mbarrier.init(norm_full.index(0), count=1)
    mbarrier.init(norm_empty.index(0), count=2)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (add_up, (0, out, seq_lens, query_start, work, partial, k_tiles, alphas, norms, k_empty, p_full, norm_full, norm_empty,
                      out_row_stride, out_head_stride, GROUP, RANK, ROWS, BLOCK_M, BLOCK_N, STAGES, KEEP_ROWS, ITEM_COST)),
            (add_up, (1, out, seq_lens, query_start, work, partial, k_tiles, alphas, norms, k_empty, p_full, norm_full, norm_empty,
                      out_row_stride, out_head_stride, GROUP, RANK, ROWS, BLOCK_M, BLOCK_N, STAGES, KEEP_ROWS, ITEM_COST)),
            (weigh, (lse, seq_lens, query_start, work, partial_stats, q_tiles, k_tiles, alphas, norms, q_full, q_empty, k_full, p_full,
                     norm_full, norm_empty, lse_row_stride, scale, GROUP, ROWS, HAS_LSE, BLOCK_M, BLOCK_N, STAGES, KEEP_ROWS, ITEM_COST)),
            (produce, (query, rows, page_table, seq_lens, query_start, work, q_tiles, k_tiles, q_full, q_empty, k_full, k_empty,
                       query_row_stride, query_head_stride, table_stride, page_stride, TOKEN_STRIDE, GROUP, PAGE_SIZE, ROWS, BLOCK_M,
                       BLOCK_N, STAGES, ITEM_COST)),
        ],
        [4, 4, 4],
        [SUM_REGISTERS, WEIGHT_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
