"""Weighted sums of latents, half of the columns in each of two groups; see `hopper_kernel.py`."""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from paged_attn.backends.attention.triton.hopper.consumer import thread_barrier
from paged_attn.backends.attention.triton.tiles import first_item, next_item, tile_keys


@gluon.jit
def add_up(half: gl.constexpr, out, seq_lens, query_start, work, partial, k_tiles, alphas, norms, k_empty, p_full, norm_full,
           norm_empty, out_row_stride, out_head_stride,
           GROUP: gl.constexpr, RANK: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
           STAGES: gl.constexpr, KEEP_ROWS: gl.constexpr, ITEM_COST: gl.constexpr):  # fmt: skip
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
            if items > 0:  # the item begins here
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
