"""Latent attention on Hopper, in Gluon: four warp groups, so that loads, scores, softmax and weighted sums of different blocks overlap.

One group copies rows from their pages (`hopper_producer.py`), and one turns scores into weights (`weigh`). Two add up latents (`add_up`),
each half of the columns: sums of 64 rows over a rank of 512 take half of a multiprocessor's registers. Queries of 64 rows and two blocks
of 64 tokens take 216 KiB of shared memory. So once a block's scores no longer need its rotated parts, its weights overwrite them. Fewer
than 64 rows are padded with zeros: memory is the limit then, and the matrix units wait for it anyway.

Arguments, work list and what is left for `merge_latent`: as in `attend_kernel.py`. Serves 16 bits and what `tiling.in_latent_hopper` lists.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from paged_attn.backends.attention.triton.hopper.consumer import LOG2E, NO_KEY, thread_barrier
from paged_attn.backends.attention.triton.hopper.parts import scores_of, sums_layout
from paged_attn.backends.attention.triton.latent.hopper_producer import produce
from paged_attn.backends.attention.triton.tiles import first_item, next_item, tile_keys


@gluon.jit
def weigh(lse, seq_lens, query_start, work, partial_stats, q_tiles, k_tiles, alphas, norms, q_full, q_empty, k_full, p_full, norm_full,
          norm_empty, lse_row_stride, scale,
          GROUP: gl.constexpr, ROWS: gl.constexpr, HAS_LSE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
          STAGES: gl.constexpr, KEEP_ROWS: gl.constexpr, ITEM_COST: gl.constexpr):  # fmt: skip
    """Scores of a block and their softmax. The weights overwrite the block's rotated parts; the factor for the earlier sums goes beside
    them."""
    layout: gl.constexpr = sums_layout(BLOCK_N)
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    program = gl.program_id(0)
    request, tile, kv_head, block, left, start, query_len, seq_len = first_item(work + program * 16)
    kept = gl.arange(0, BLOCK_M, layout=row_layout)
    offset = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=layout)
    count = 0
    items = 0
    while left > 0:
        _, _, _, high = tile_keys(tile, query_len, seq_len, 0, 0, GROUP, True, False, "none", BLOCK_M, 0)
        blocks = (high + BLOCK_N - 1) // BLOCK_N
        take = gl.minimum(blocks - block, left)
        flat = tile * BLOCK_M + kept
        position = seq_len - query_len + flat // GROUP
        m = gl.full([BLOCK_M], NO_KEY, gl.float32, layout=row_layout)
        norm = gl.zeros([BLOCK_M], gl.float32, layout=row_layout)
        mbarrier.wait(q_full.index(0), items & 1)
        for i in range(take):
            stage = count % STAGES
            mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
            fence_async_shared()
            s = warpgroup_mma_wait(0, deps=[scores_of(q_tiles, 0, k_tiles, stage, zero)])
            key = (block + i) * BLOCK_N + offset
            s = gl.where((key < high)[None, :] & (key[None, :] <= position[:, None]), s * (scale * LOG2E), NO_KEY)
            m_new = gl.maximum(m, gl.max(s, 1))
            shift = gl.where(m_new == NO_KEY, 0.0, m_new)  # a row may not have seen a token yet
            alpha = gl.exp2(m - shift)
            p = gl.exp2(s - shift[:, None])
            thread_barrier()  # all warps have read the rotated parts
            k_tiles[2].index(stage).store(p.to(k_tiles[2].dtype))
            alphas.index(stage).store(alpha)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(p_full.index(stage), count=1)
            norm = norm * alpha + gl.sum(p, 1)
            m = m_new
            count += 1
        mbarrier.arrive(q_empty.index(0), count=1)
        mbarrier.wait(norm_empty.index(0), (items & 1) ^ 1)
        norms.index(0).store(norm)
        thread_barrier()
        mbarrier.arrive(norm_full.index(0), count=1)
        if take < blocks:
            slot = 2 * program
            if items > 0:  # the item starts here
                slot += 1
            gl.store(partial_stats + slot * (2 * KEEP_ROWS) + kept, m, mask=kept < KEEP_ROWS)
            gl.store(partial_stats + slot * (2 * KEEP_ROWS) + KEEP_ROWS + kept, norm, mask=kept < KEEP_ROWS)
        elif HAS_LSE:
            row = (start + flat // GROUP).to(gl.int64)
            gl.store(lse + row * lse_row_stride + flat % GROUP, (m + gl.log2(norm)) / LOG2E, mask=flat < query_len * GROUP)
        left -= take + ITEM_COST
        items += 1
        block = 0
        request, tile, kv_head, start, query_len, seq_len = next_item(request, tile, kv_head, start, query_len, seq_len, left, query_start,
                                                                      seq_lens, 1, GROUP, ROWS, BLOCK_M)  # fmt: skip


@gluon.jit
def add_up(half: gl.constexpr, out, seq_lens, query_start, work, partial, k_tiles, alphas, norms, k_empty, p_full, norm_full,
           norm_empty, out_row_stride, out_head_stride,
           GROUP: gl.constexpr, RANK: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
           STAGES: gl.constexpr, KEEP_ROWS: gl.constexpr, ITEM_COST: gl.constexpr):  # fmt: skip
    """Weighted sums of latents, for one half of the columns."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])  # 256 columns: no fewer registers than at launch
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    program = gl.program_id(0)
    request, tile, kv_head, block, left, start, query_len, seq_len = first_item(work + program * 16)
    kept = gl.arange(0, BLOCK_M, layout=row_layout)
    column = half * (RANK // 2) + gl.arange(0, RANK // 2, layout=gl.SliceLayout(0, layout))
    count = 0
    items = 0
    while left > 0:
        _, _, _, high = tile_keys(tile, query_len, seq_len, 0, 0, GROUP, True, False, "none", BLOCK_M, 0)
        blocks = (high + BLOCK_N - 1) // BLOCK_N
        take = gl.minimum(blocks - block, left)
        sums = gl.zeros([BLOCK_M, RANK // 2], gl.float32, layout=layout)
        for _ in range(take):
            stage = count % STAGES
            mbarrier.wait(p_full.index(stage), (count // STAGES) & 1)
            fence_async_shared()
            sums = sums * alphas.index(stage).load(row_layout)[:, None]
            sums = warpgroup_mma(k_tiles[2].index(stage), k_tiles[half].index(stage), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
            thread_barrier()
            mbarrier.arrive(k_empty.index(stage), count=1)
            count += 1
        mbarrier.wait(norm_full.index(0), items & 1)
        norm = norms.index(0).load(row_layout)
        thread_barrier()
        mbarrier.arrive(norm_empty.index(0), count=1)
        if take < blocks:
            slot = 2 * program
            if items > 0:  # the item starts here
                slot += 1
            to = partial + slot.to(gl.int64) * (KEEP_ROWS * RANK) + (kept * RANK)[:, None] + column[None, :]
            gl.store(to, sums, mask=(kept < KEEP_ROWS)[:, None])
        else:
            flat = tile * BLOCK_M + kept
            out_at = (
                out + ((start + flat // GROUP).to(gl.int64) * out_row_stride + flat % GROUP * out_head_stride)[:, None] + column[None, :]
            )
            gl.store(out_at, (sums / norm[:, None]).to(out.dtype.element_ty), mask=(flat < query_len * GROUP)[:, None])
        left -= take + ITEM_COST
        items += 1
        block = 0
        request, tile, kv_head, start, query_len, seq_len = next_item(request, tile, kv_head, start, query_len, seq_len, left, query_start,
                                                                      seq_lens, 1, GROUP, ROWS, BLOCK_M)  # fmt: skip


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
