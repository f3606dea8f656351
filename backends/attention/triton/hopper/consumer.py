"""The Hopper kernel's consumers: each multiplies half of a tile with the keys and values that the producer copied, and merges parts.

A consumer issues q.K of the next block before it waits for p.V of the last one, so that the softmax runs beside the matrix products
(FlashAttention-3, Shah et al., 2024, https://arxiv.org/abs/2407.08608).
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from paged_attn.backends.attention.triton.hopper.parts import (
    add_stored,
    add_values,
    copy_layout,
    finished_sums,
    first_width,
    scaled_sums,
    scores_of,
    store_sums,
    sums_layout,
    zero_sums,
)
from paged_attn.backends.attention.triton.tiles import first_item, next_item, tile_keys

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # for one warp group; renamed in Triton 3.7
LOG2E = gl.constexpr(1.4426950408889634)
NO_KEY = gl.constexpr(float("-inf"))


@gluon.jit
def _softmax(s, m, key, end, position, clear, mixed, first_key, scale, softcap, window, chunk,
             CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, CHUNKS: gl.constexpr, HAS_SOFTCAP: gl.constexpr):  # fmt: skip
    """Raw products [64, keys] -> weights, the new maximum, and the factor for the old sums. Masks only where a row may not see all keys."""
    if HAS_SOFTCAP:
        x = s * (scale / softcap)
        s = (softcap * LOG2E) * (1 - 2 / (gl.exp(2 * x) + 1))
        factor = 1.0
    else:
        factor = scale * LOG2E
    if (first_key < clear) | (first_key >= mixed):
        seen = (key < end)[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        if CHUNKS != "none":
            seen = seen & (key[None, :] // chunk == position[:, None] // chunk)
        s = gl.where(seen, s, NO_KEY)
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    shift = gl.where(m_new == NO_KEY, 0.0, m_new)
    alpha = gl.exp2(m - shift)
    p = gl.exp2(s * factor - shift[:, None])
    return p, m_new, alpha


@gluon.jit
def _write_part(out, tile, column, flat0, start, query_len, row_stride, head_stride, GROUP: gl.constexpr):
    """Writes results of flattened rows from `flat0` on, columns from `column` on, from shared memory to the KV head's output."""
    layout: gl.constexpr = copy_layout(tile.shape[1])
    flat = flat0 + gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, layout))
    at = (start + flat // GROUP).to(gl.int64) * row_stride + flat % GROUP * head_stride
    there = (flat < query_len * GROUP)[:, None]
    gl.store(out + at[:, None] + columns[None, :], tile.load(layout).to(out.dtype.element_ty), mask=there)


@gluon.jit
def consume(half: gl.constexpr, query, out, sinks, lse, seq_lens, query_start, work, partial, partial_stats, counters,
            q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, out_row_stride, out_head_stride,
            lse_row_stride, scale, softcap, window, chunk,
            KV_HEADS: gl.constexpr, GROUP: gl.constexpr, V_DIM: gl.constexpr, ROWS: gl.constexpr, CAUSAL: gl.constexpr,
            HAS_WINDOW: gl.constexpr, CHUNKS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
            BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, QUERY_TILES: gl.constexpr,
            TURNS: gl.constexpr, ITEM_COST: gl.constexpr):  # fmt: skip
    """One consumer's half (0 or 1) of each tile: walks through the program's share of the work, item by item, as `attend` does.

    The producer fills `q_tiles`, `k_tiles` and `v_tiles`. A barrier `.._full` says that a buffer may be read, `.._empty` that it may be
    filled again. With TURNS the two consumers issue their products in turn (`turn`).
    """
    HALF_ROWS: gl.constexpr = BLOCK_M // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = sums_layout(first_width(V_DIM))
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    program = gl.program_id(0)
    mine = work + program * 16
    request, tile, kv_head, block, left, start, query_len, seq_len = first_item(mine)
    part_first = gl.load(mine + 5)
    part_last = gl.load(mine + 6)
    part_slot = gl.load(mine + 7)
    key_offset = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s_layout))
    count = 0
    turns = 0
    items = 0
    while left > 0:
        first, last, low, high = tile_keys(tile, query_len, seq_len, window, chunk, GROUP, CAUSAL, HAS_WINDOW, CHUNKS, BLOCK_M, BLOCK_N)
        blocks = (high - low + BLOCK_N - 1) // BLOCK_N
        take = gl.minimum(blocks - block, left)
        flat0 = tile * BLOCK_M + half * HALF_ROWS

        buffer = items % QUERY_TILES
        q_buffer = 2 * buffer + half
        mbarrier.wait(q_full.index(buffer), (items // QUERY_TILES) & 1)
        position = seq_len - query_len + (flat0 + gl.arange(0, HALF_ROWS, layout=s_rows)) // GROUP
        # Blocks that every row sees whole are between `clear` and `mixed`.
        clear = low
        if HAS_WINDOW:
            clear = gl.maximum(clear, last - window + 1)
        if CHUNKS != "none":
            clear = gl.maximum(clear, last // chunk * chunk)
        mixed = high
        if CAUSAL:
            mixed = gl.minimum(mixed, first + 1)
        if CHUNKS != "none":
            mixed = gl.minimum(mixed, (first // chunk + 1) * chunk)
        mixed = mixed - BLOCK_N + 1  # the first block that does not end before it

        m = gl.full([HALF_ROWS], NO_KEY, gl.float32, layout=s_rows)
        sums = zero_sums(HALF_ROWS, V_DIM)
        zero = gl.zeros([HALF_ROWS, BLOCK_N], gl.float32, layout=s_layout)
        first_key = low + block * BLOCK_N

        stage = count % STAGES
        if TURNS:
            mbarrier.wait(turn.index(half), (turns & 1) ^ (1 - half))
            turns += 1
        mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
        fence_async_shared()
        s = scores_of(q_tiles, q_buffer, k_tiles, stage, zero)
        if TURNS:
            mbarrier.arrive(turn.index(1 - half), count=1)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, m, alpha = _softmax(s, m, first_key + key_offset, high, position, clear, mixed, first_key, scale, softcap, window, chunk, CAUSAL,
                               HAS_WINDOW, CHUNKS, HAS_SOFTCAP)  # fmt: skip
        norm = gl.sum(p, 1)
        weights = gl.convert_layout(p.to(query.dtype.element_ty), p_layout)
        for _ in range(take - 1):
            before = count % STAGES
            before_phase = (count // STAGES) & 1
            count += 1
            first_key += BLOCK_N
            stage = count % STAGES
            if TURNS:
                mbarrier.wait(turn.index(half), (turns & 1) ^ (1 - half))
                turns += 1
            mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
            fence_async_shared()
            s_next = scores_of(q_tiles, q_buffer, k_tiles, stage, zero)
            mbarrier.wait(v_full.index(before), before_phase)
            fence_async_shared()
            issued = add_values(sums, weights, v_tiles, before)
            if TURNS:
                mbarrier.arrive(turn.index(1 - half), count=1)
            s = warpgroup_mma_wait(len(v_tiles), deps=[s_next])
            mbarrier.arrive(k_empty.index(stage), count=1)
            p, m, alpha = _softmax(s, m, first_key + key_offset, high, position, clear, mixed, first_key, scale, softcap, window, chunk,
                                   CAUSAL, HAS_WINDOW, CHUNKS, HAS_SOFTCAP)  # fmt: skip
            norm = norm * alpha + gl.sum(p, 1)
            sums = finished_sums(issued)
            mbarrier.arrive(v_empty.index(before), count=1)
            weights = gl.convert_layout(p.to(query.dtype.element_ty), p_layout)
            sums = scaled_sums(sums, alpha)
        stage = count % STAGES
        mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
        fence_async_shared()
        sums = finished_sums(add_values(sums, weights, v_tiles, stage))
        mbarrier.arrive(v_empty.index(stage), count=1)
        count += 1

        m_o = gl.convert_layout(m, o_rows)
        norm_o = gl.convert_layout(norm, o_rows)
        row_in_half = gl.arange(0, HALF_ROWS, layout=o_rows)
        flat_o = flat0 + row_in_half
        mask_o = flat_o < query_len * GROUP
        row = (start + flat_o // GROUP).to(gl.int64)
        head = kv_head * GROUP + flat_o % GROUP
        finished = take == blocks
        if not finished:
            slot = 2 * program
            if items > 0:  # the item starts here: its parts belong to this program and those after it
                slot += 1
                part_slot = slot
                part_first = program
                part_last = gl.load(mine + 16 + 6)
            kept = half * HALF_ROWS + row_in_half
            store_sums(partial + slot.to(gl.int64) * (BLOCK_M * V_DIM), kept, sums, V_DIM)
            gl.store(partial_stats + slot * (2 * BLOCK_M) + kept, m_o)
            gl.store(partial_stats + slot * (2 * BLOCK_M) + BLOCK_M + kept, norm_o)
            thread_barrier()
            parts = part_last - part_first + 1
            counter = counters + 2 * part_first + half
            finished = gl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
            if finished:
                gl.store(counter, 0)
                m_o = gl.full([HALF_ROWS], NO_KEY, gl.float32, layout=o_rows)
                norm_o = gl.zeros([HALF_ROWS], gl.float32, layout=o_rows)
                sums = zero_sums(HALF_ROWS, V_DIM)
                for part in range(parts):
                    at = gl.where(part == 0, part_slot, 2 * (part_first + part))
                    part_m = gl.load(partial_stats + at * (2 * BLOCK_M) + kept, cache_modifier=".cg")
                    part_norm = gl.load(partial_stats + at * (2 * BLOCK_M) + BLOCK_M + kept, cache_modifier=".cg")
                    m_new = gl.maximum(m_o, part_m)
                    shift = gl.where(m_new == NO_KEY, 0.0, m_new)
                    weight = gl.exp2(part_m - shift)
                    shrink = gl.exp2(m_o - shift)
                    norm_o = norm_o * shrink + part_norm * weight
                    part_sums = partial + at.to(gl.int64) * (BLOCK_M * V_DIM)
                    sums = add_stored(scaled_sums(sums, shrink), part_sums, kept, weight, V_DIM)
                    m_o = m_new
        if finished:
            if HAS_SINKS:
                sink = gl.load(sinks + head, mask=mask_o, other=0.0).to(gl.float32) * LOG2E
                m_new = gl.maximum(m_o, sink)
                shrink = gl.exp2(m_o - m_new)
                norm_o = norm_o * shrink + gl.exp2(sink - m_new)
                sums = scaled_sums(sums, shrink)
                m_o = m_new
            for part in gl.static_range(len(sums)):  # through the queries' memory, so that 16 bytes are written at a time
                ours = sums[part] / gl.convert_layout(norm_o, gl.SliceLayout(1, sums[part].type.layout))[:, None]
                q_tiles[part].index(q_buffer).store(ours.to(query.dtype.element_ty))
            thread_barrier()
            heads = out + kv_head * GROUP * out_head_stride
            for part in gl.static_range(len(sums)):
                _write_part(heads, q_tiles[part].index(q_buffer), part * first_width(V_DIM), flat0, start, query_len, out_row_stride,
                            out_head_stride, GROUP)  # fmt: skip
            if HAS_LSE:
                gl.store(lse + row * lse_row_stride + head, (m_o + gl.log2(norm_o)) / LOG2E, mask=mask_o)

        mbarrier.arrive(q_empty.index(buffer), count=1)
        left -= take + ITEM_COST
        items += 1
        block = 0
        request, tile, kv_head, start, query_len, seq_len = next_item(request, tile, kv_head, start, query_len, seq_len, left, query_start,
                                                                      seq_lens, KV_HEADS, GROUP, ROWS, BLOCK_M)  # fmt: skip
