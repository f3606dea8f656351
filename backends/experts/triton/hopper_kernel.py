"""The two products of experts for many tokens on Hopper: one producer warpgroup copies to shared memory, two consumers multiply.

Programs are persistent: each takes one tile after the other, and copies for the next while the last one's results are written. A tile is
128 pairs of an expert and 256 rows of its weight; each consumer has 64 of the pairs, and idles if the expert has none left for it. Rows on
the left side may lie anywhere (cp.async); those of the weight are adjacent (TMA).
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from paged_attn.backends.attention.triton.hopper.consumer import thread_barrier
from paged_attn.backends.attention.triton.hopper.parts import copy_layout
from paged_attn.backends.experts.triton.gate import activated, gated

HALF = gl.constexpr(64)  # pairs per consumer warpgroup
COLUMNS = gl.constexpr(256)  # rows of the weight, which are columns of the product
DEPTH = gl.constexpr(64)


@gluon.jit(do_not_specialize=["num_blocks"])
def product_hopper(
    left, pairs, blocks, weight, bias, scales, out, num_blocks, left_stride, expert_rows, up_rows, bias_stride, limit, alpha,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, N: gl.constexpr, K: gl.constexpr, K_FIRST: gl.constexpr, GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr, HAS_BIAS: gl.constexpr, SCALED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr,
    HAS_ALPHA: gl.constexpr, GATE_SOFTCAP: gl.constexpr, UP_SOFTCAP: gl.constexpr, UP_FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out [T k, N], by pair: an expert's result for row pair // TOP_K of `left` [.., K]; grid (programs,), 4 warps and 8 more.

    weight: rows of all experts as one matrix, [.., K], or with K_FIRST [.., N of an expert]. Each expert starts `expert_rows` after the one
    before, its ups `up_rows` after its gates. SCALED: only multiplied by `scales` [T k]; otherwise activated or gated.
    """
    dtype: gl.constexpr = left.dtype.element_ty
    left_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, DEPTH], dtype)
    left_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF, DEPTH], left_layout)
    shape: gl.constexpr = [STAGES, DEPTH, COLUMNS] if K_FIRST else [STAGES, COLUMNS, DEPTH]
    weight_tiles = gl.allocate_shared_memory(dtype, shape, weight.layout)
    left_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    weight_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(left_full.index(i), count=128)
        mbarrier.init(weight_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (_consume, (0, pairs, blocks, bias, scales, out, num_blocks, bias_stride, limit, alpha, left_tiles, weight_tiles, left_full,
                        weight_full, empty, EXPERTS, N, K, K_FIRST, GATED, INTERLEAVED, HAS_BIAS, SCALED, ACTIVATION, HAS_LIMIT, HAS_ALPHA,
                        GATE_SOFTCAP, UP_SOFTCAP, UP_FIRST, STAGES)),
            (_consume, (1, pairs, blocks, bias, scales, out, num_blocks, bias_stride, limit, alpha, left_tiles, weight_tiles, left_full,
                        weight_full, empty, EXPERTS, N, K, K_FIRST, GATED, INTERLEAVED, HAS_BIAS, SCALED, ACTIVATION, HAS_LIMIT, HAS_ALPHA,
                        GATE_SOFTCAP, UP_SOFTCAP, UP_FIRST, STAGES)),
            (_produce, (left, pairs, blocks, weight, num_blocks, left_stride, expert_rows, up_rows, left_tiles, weight_tiles, left_full,
                        weight_full, empty, EXPERTS, TOP_K, N, K, K_FIRST, GATED, INTERLEAVED, STAGES)),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip


@gluon.jit
def _produce(left, pairs, blocks, weight, num_blocks, left_stride, expert_rows, up_rows, left_tiles, weight_tiles, left_full,
             weight_full, empty, EXPERTS: gl.constexpr, TOP_K: gl.constexpr, N: gl.constexpr, K: gl.constexpr, K_FIRST: gl.constexpr,
             GATED: gl.constexpr, INTERLEAVED: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    APART: gl.constexpr = GATED and not INTERLEAVED  # half of the tile's columns are gates, half ups
    layout: gl.constexpr = copy_layout(DEPTH)
    row = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    depth = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, layout))
    tile = gl.program_id(0)
    block, column, expert = _tile(tile, blocks, num_blocks, EXPERTS, N, GATED)
    count = 0
    while expert < EXPERTS:
        first, last = _slots(blocks, num_blocks, block)
        near, far = first + row < last, first + HALF + row < last
        near_row = gl.load(pairs + first + row, mask=near, other=0) // TOP_K
        far_row = gl.load(pairs + first + HALF + row, mask=far, other=0) // TOP_K
        near_at, far_at = near_row.to(gl.int64) * left_stride, far_row.to(gl.int64) * left_stride
        for step in range(K // DEPTH):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(weight_full.index(stage), COLUMNS * DEPTH * 2)
            if K_FIRST:
                at = [expert * expert_rows + step * DEPTH, column * COLUMNS]
                tma.async_copy_global_to_shared(weight, at, weight_full.index(stage), weight_tiles.index(stage))
            elif APART:
                at = expert * expert_rows + column * (COLUMNS // 2)
                gates, ups = weight_tiles.index(stage).slice(0, COLUMNS // 2), weight_tiles.index(stage).slice(COLUMNS // 2, COLUMNS // 2)
                tma.async_copy_global_to_shared(weight, [at, step * DEPTH], weight_full.index(stage), gates)
                tma.async_copy_global_to_shared(weight, [at + up_rows, step * DEPTH], weight_full.index(stage), ups)
            else:
                at = [expert * expert_rows + column * COLUMNS, step * DEPTH]
                tma.async_copy_global_to_shared(weight, at, weight_full.index(stage), weight_tiles.index(stage))
            source = left + step * DEPTH
            async_copy.async_copy_global_to_shared(
                left_tiles.index(2 * stage), (source + near_at)[:, None] + depth[None, :], mask=near[:, None]
            )
            async_copy.async_copy_global_to_shared(
                left_tiles.index(2 * stage + 1), (source + far_at)[:, None] + depth[None, :], mask=far[:, None]
            )
            async_copy.mbarrier_arrive(left_full.index(stage), increment_count=False)
            count += 1
        tile += gl.num_programs(0)
        block, column, expert = _tile(tile, blocks, num_blocks, EXPERTS, N, GATED)


@gluon.jit
def _consume(half: gl.constexpr, pairs, blocks, bias, scales, out, num_blocks, bias_stride, limit, alpha, left_tiles, weight_tiles,
             left_full, weight_full, empty, EXPERTS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, K_FIRST: gl.constexpr,
             GATED: gl.constexpr, INTERLEAVED: gl.constexpr, HAS_BIAS: gl.constexpr, SCALED: gl.constexpr, ACTIVATION: gl.constexpr,
             HAS_LIMIT: gl.constexpr, HAS_ALPHA: gl.constexpr, GATE_SOFTCAP: gl.constexpr, UP_SOFTCAP: gl.constexpr,
             UP_FIRST: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    tile = gl.program_id(0)
    block, column, expert = _tile(tile, blocks, num_blocks, EXPERTS, N, GATED)
    count = 0
    while expert < EXPERTS:
        first, last = _slots(blocks, num_blocks, block)
        first += half * HALF
        if first < last:
            total = gl.zeros([HALF, COLUMNS], gl.float32, layout=sums)
            for step in range(K // DEPTH):
                stage = count % STAGES
                phase = (count // STAGES) & 1
                mbarrier.wait(weight_full.index(stage), phase)
                mbarrier.wait(left_full.index(stage), phase)
                fence_async_shared()
                right = weight_tiles.index(stage) if K_FIRST else weight_tiles.index(stage).permute((1, 0))
                total = warpgroup_mma(left_tiles.index(2 * stage + half), right, total, is_async=True)
                total = warpgroup_mma_wait(1, deps=[total])
                if step > 0:
                    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
                count += 1
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
            _finish(total, first, last, pairs, bias + expert.to(gl.int64) * bias_stride, scales, out, column, limit, alpha, N, GATED,
                    INTERLEAVED, HAS_BIAS, SCALED, ACTIVATION, HAS_LIMIT, HAS_ALPHA, GATE_SOFTCAP, UP_SOFTCAP, UP_FIRST)  # fmt: skip
        else:
            for _ in range(K // DEPTH):
                stage = count % STAGES
                mbarrier.wait(weight_full.index(stage), (count // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                count += 1
        tile += gl.num_programs(0)
        block, column, expert = _tile(tile, blocks, num_blocks, EXPERTS, N, GATED)


@gluon.jit
def _finish(total, first, last, pairs, bias, scales, out, column, limit, alpha, N: gl.constexpr, GATED: gl.constexpr,
            INTERLEAVED: gl.constexpr, HAS_BIAS: gl.constexpr, SCALED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr,
            HAS_ALPHA: gl.constexpr, GATE_SOFTCAP: gl.constexpr, UP_SOFTCAP: gl.constexpr, UP_FIRST: gl.constexpr):  # fmt: skip
    """Turns sums of products into rows of `out`."""
    if GATED:
        if INTERLEAVED:
            if HAS_BIAS:
                total = _with_bias(total, bias, column * COLUMNS, 2 * N)
            gate, up = gl.split(total.reshape([HALF, COLUMNS // 2, 2]))
        else:
            gate, up = gl.split(total.reshape([HALF, 2, COLUMNS // 2]).permute((0, 2, 1)))
            if HAS_BIAS:
                gate = _with_bias(gate, bias, column * (COLUMNS // 2), N)
                up = _with_bias(up, bias + N, column * (COLUMNS // 2), N)
        result = gated(gate, up, limit, alpha, ACTIVATION, HAS_LIMIT, HAS_ALPHA, GATE_SOFTCAP, UP_SOFTCAP, UP_FIRST)
        _write(result, first, last, pairs, scales, out, column * (COLUMNS // 2), N, False)
    else:
        if HAS_BIAS:
            total = _with_bias(total, bias, column * COLUMNS, N)
        if not SCALED:
            total = activated(total, ACTIVATION)
        low, high = gl.split(total.reshape([HALF, 2, COLUMNS // 2]).permute((0, 2, 1)))
        _write(low, first, last, pairs, scales, out, column * COLUMNS, N, SCALED)
        _write(high, first, last, pairs, scales, out, column * COLUMNS + COLUMNS // 2, N, SCALED)


@gluon.jit
def _with_bias(sums, bias, start, N: gl.constexpr):
    n = start + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, sums.type.layout))
    return sums + gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _write(result, first, last, pairs, scales, out, start, N: gl.constexpr, SCALED: gl.constexpr):
    """Writes rows of [64, 128] to their pairs' rows, 16 bytes at a time; a warp keeps its rows and exchanges columns between threads."""
    layout: gl.constexpr = gl.BlockedLayout([8, 8], [2, 16], [4, 1], [1, 0])
    slot = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    n = start + gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, layout))
    pair = gl.load(pairs + slot, mask=slot < last, other=0)
    if SCALED:
        rows: gl.constexpr = gl.SliceLayout(1, result.type.layout)
        mine = first + gl.arange(0, HALF, layout=rows)
        own = gl.load(pairs + mine, mask=mine < last, other=0)
        result *= gl.load(scales + own).to(gl.float32)[:, None]
    moved = gl.convert_layout(result.to(out.dtype.element_ty), layout)
    at = out + (pair.to(gl.int64) * N)[:, None] + n[None, :]
    gl.store(at, moved, mask=(slot < last)[:, None] & (n < N)[None, :])


@gluon.jit
def _tile(tile, blocks, num_blocks, EXPERTS: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr):
    """A tile's block of pairs, its column, and its expert; EXPERTS after the last tile."""
    WIDTH: gl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    columns: gl.constexpr = (N + WIDTH - 1) // WIDTH
    block = tile // columns
    expert = gl.load(blocks + block, mask=block < num_blocks, other=EXPERTS)
    return block, tile % columns, expert


@gluon.jit
def _slots(blocks, num_blocks, block):
    """A block's first slot, and where its expert's slots end."""
    return gl.load(blocks + num_blocks + block), gl.load(blocks + 2 * num_blocks + block)
