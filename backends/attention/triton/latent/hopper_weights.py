"""Scores of a block and their softmax, for the groups that add up latents; see `hopper_kernel.py`."""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from paged_attn.backends.attention.triton.hopper.consumer import LOG2E, NO_KEY, thread_barrier
from paged_attn.backends.attention.triton.hopper.parts import scores_of, sums_layout
from paged_attn.backends.attention.triton.tiles import first_item, next_item, tile_keys


@gluon.jit
def weigh(lse, seq_lens, query_start, work, partial_stats, q_tiles, k_tiles, alphas, norms, q_full, q_empty, k_full, p_full, norm_full,
          norm_empty, lse_row_stride, scale,
          GROUP: gl.constexpr, ROWS: gl.constexpr, HAS_LSE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
          STAGES: gl.constexpr, KEEP_ROWS: gl.constexpr, ITEM_COST: gl.constexpr):  # fmt: skip
    """A block's weights lie where its rotated parts were, and beside them what the sums before it shrink by."""
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
            shift = gl.where(m_new == NO_KEY, 0.0, m_new)  # a row may have seen no token yet
            alpha = gl.exp2(m - shift)
            p = gl.exp2(s - shift[:, None])
            thread_barrier()  # all warps are done with the rotated parts
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
            if items > 0:  # the item begins here
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
