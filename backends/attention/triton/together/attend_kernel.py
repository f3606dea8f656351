"""Attention of a decode step whose tiles have the queries of several requests; parts of a tile are merged as `attend` does.

query [R, q_heads, QK_DIM], one row a request; `ends` as `count_together` leaves it; all else as in `attend_kernel`.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.attention.triton.attend_kernel import NO_KEY, _finish, _scores


@triton.jit
def _walk_rows(q, acc, m, norm, begin, end, rows, table, keys, values, page_stride, key_token_stride, value_token_stride, scale, softcap,
               HAS_SOFTCAP: tl.constexpr, PAGE_SIZE: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
               BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Keys [begin, end) of one page table, which only some rows see."""
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    key = begin + tl.arange(0, BLOCK_N)
    page = tl.load(table + key // PAGE_SIZE, mask=key < end, other=0)
    for start in tl.range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        base, there = page.to(tl.int64) * page_stride, key < end
        token = key % PAGE_SIZE
        page = tl.load(table + (key + BLOCK_N) // PAGE_SIZE, mask=key + BLOCK_N < end, other=0)
        k_at = keys + (base + token * key_token_stride)[:, None] + d[None]
        v_at = values + (base + token * value_token_stride)[:, None] + dv[None]
        k = tl.load(k_at, mask=there[:, None] & (d < QK_DIM)[None], other=0.0)
        v = tl.load(v_at, mask=there[:, None] & (dv < V_DIM)[None], other=0.0)
        raw = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        s = _scores(raw, scale, softcap, m, m, m, key, 1, rows, HAS_SOFTCAP, False, "none")
        s = tl.where(there[None] & rows[:, None], s, NO_KEY)
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == NO_KEY, 0.0, m_new)
        alpha = tl.exp2(m - shift)
        p = tl.exp2(s - shift[:, None])
        norm = norm * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, norm


@triton.jit(do_not_specialize=["requests", "table_stride"])
def attend_together(query, keys, values, out, new_keys, new_values, sinks, lse, page_table, seq_lens, ends, work, partial, partial_stats,
                    counters, requests, table_stride, page_stride, key_token_stride, key_head_stride, value_token_stride,
                    value_head_stride, query_row_stride, query_head_stride, out_row_stride, out_head_stride, new_key_row_stride,
                    new_key_head_stride, new_value_row_stride, new_value_head_stride, lse_row_stride, scale, softcap,
                    GROUP: tl.constexpr, MEMBERS: tl.constexpr, SEGMENTS: tl.constexpr, KV_HEADS: tl.constexpr, QK_DIM: tl.constexpr,
                    V_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
                    HAS_LSE: tl.constexpr, FUSED_WRITE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, MERGE_PARTS: tl.constexpr, PRECISION: tl.constexpr,
                    ITEM_COST: tl.constexpr):  # fmt: skip
    """One layer; grid (programs,)."""
    program = tl.program_id(0)
    mine = work + program * 16
    tile, kv_head, block, left = tl.load(mine), tl.load(mine + 2), tl.load(mine + 3), tl.load(mine + 4)
    part_first, part_last, part_slot = tl.load(mine + 5), tl.load(mine + 6), tl.load(mine + 7)
    d, dv, segments, flat = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, SEGMENTS), tl.arange(0, BLOCK_M)
    member, head_of = flat // GROUP, flat % GROUP
    items = 0
    while left > 0:
        bounds = tl.load(ends + tile * SEGMENTS + segments)
        shared, blocks = tl.sum(tl.where(segments == 0, bounds, 0), 0), tl.max(bounds, 0)
        take = tl.minimum(blocks - block, left)
        row = tile * MEMBERS + member
        row_mask = (member < MEMBERS) & (row < requests)
        head = kv_head * GROUP + head_of
        q_at = query + (row.to(tl.int64) * query_row_stride)[:, None] + (head * query_head_stride)[:, None] + d[None]
        q = tl.load(q_at, mask=row_mask[:, None] & (d < QK_DIM)[None], other=0.0)
        m = tl.full([BLOCK_M], NO_KEY, tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        head_keys, head_values = keys + kv_head * key_head_stride, values + kv_head * value_head_stride
        # A segment of no blocks ends where the one before it does, and is passed over.
        segment = tl.sum((bounds <= block).to(tl.int32), 0)
        last = tl.sum((bounds < block + take).to(tl.int32), 0)
        for each in tl.range(segment, last + 1):
            from_block = tl.max(tl.where(segments < each, bounds, 0), 0)
            to_block = tl.sum(tl.where(segments == each, bounds, 0), 0)
            begin_block, end_block = tl.maximum(block, from_block), tl.minimum(block + take, to_block)
            request = tile * MEMBERS + tl.maximum(each - 1, 0)
            rows = row_mask & ((member == each - 1) | (each == 0))
            own = tl.where(each == 0, 0, shared)  # blocks before its first
            length = tl.load(seq_lens + request)
            begin = (own + begin_block - from_block) * BLOCK_N
            end = tl.minimum((own + end_block - from_block) * BLOCK_N, length)
            table = page_table + request.to(tl.int64) * table_stride
            has_new = (each > 0) & (end_block == to_block) & (end_block > begin_block)
            if FUSED_WRITE:
                new_at = length - 1
                end = tl.where(has_new, new_at, end)
                new_row = request.to(tl.int64)
                new_page = tl.load(table + new_at // PAGE_SIZE, mask=has_new, other=0).to(tl.int64)
                new_k = tl.load(new_keys + new_row * new_key_row_stride + kv_head * new_key_head_stride + d,
                                mask=has_new & (d < QK_DIM), other=0.0).to(keys.dtype.element_ty)  # fmt: skip
                new_v = tl.load(new_values + new_row * new_value_row_stride + kv_head * new_value_head_stride + dv,
                                mask=has_new & (dv < V_DIM), other=0.0).to(values.dtype.element_ty)  # fmt: skip
            acc, m, norm = _walk_rows(
                q, acc, m, norm, begin, end, rows, table, head_keys, head_values, page_stride, key_token_stride, value_token_stride,
                scale, softcap, HAS_SOFTCAP, PAGE_SIZE, QK_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION,
            )  # fmt: skip
            if FUSED_WRITE:
                if has_new:
                    in_page = new_at % PAGE_SIZE
                    tl.store(head_keys + new_page * page_stride + in_page * key_token_stride + d, new_k, mask=d < QK_DIM)
                    tl.store(head_values + new_page * page_stride + in_page * value_token_stride + dv, new_v, mask=dv < V_DIM)
                    raw = tl.sum(q.to(tl.float32) * new_k.to(q.dtype).to(tl.float32)[None], 1)
                    s = _scores(raw[:, None], scale, softcap, m, m, m, new_at + tl.arange(0, 1), 1, rows, HAS_SOFTCAP, False, "none")
                    score = tl.where(rows, tl.sum(s, 1), NO_KEY)
                    m_new = tl.maximum(m, score)
                    shift = tl.where(m_new == NO_KEY, 0.0, m_new)
                    alpha, weight = tl.exp2(m - shift), tl.exp2(score - shift)
                    norm = norm * alpha + weight
                    acc = acc * alpha[:, None] + weight[:, None] * new_v.to(q.dtype).to(tl.float32)[None]
                    m = m_new
        if take == blocks:
            _finish(acc, m, norm, out, lse, sinks, row, head, row_mask, out_row_stride, out_head_stride, lse_row_stride, HAS_SINKS, HAS_LSE,
                    V_DIM, BLOCK_DV)  # fmt: skip
        else:
            slot = 2 * program
            if items > 0:
                slot += 1
                part_slot = slot
                part_first = program
                part_last = tl.load(mine + 16 + 6)
            tl.store(partial + slot.to(tl.int64) * (BLOCK_M * BLOCK_DV) + flat[:, None] * BLOCK_DV + dv[None], acc)
            tl.store(partial_stats + slot * (2 * BLOCK_M) + flat, m)
            tl.store(partial_stats + slot * (2 * BLOCK_M) + BLOCK_M + flat, norm)
            tl.debug_barrier()
            parts = part_last - part_first + 1
            if tl.atomic_add(counters + part_first, 1, sem="acq_rel") == parts - 1:
                tl.store(counters + part_first, 0)
                merged_m = tl.full([BLOCK_M], NO_KEY, tl.float32)
                merged_norm = tl.zeros([BLOCK_M], tl.float32)
                merged = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
                for p in tl.range(0, parts, MERGE_PARTS):
                    ms, ls, accs = (), (), ()
                    for i in tl.static_range(MERGE_PARTS):
                        here = flat * 0 + (p + i) < parts
                        at = tl.where(p + i == 0, part_slot, 2 * (part_first + p + i))
                        stats = partial_stats + at * (2 * BLOCK_M) + flat
                        ms = ms + (tl.load(stats, mask=here, other=NO_KEY, cache_modifier=".cg"),)
                        ls = ls + (tl.load(stats + BLOCK_M, mask=here, other=0.0, cache_modifier=".cg"),)
                        part = partial + at.to(tl.int64) * (BLOCK_M * BLOCK_DV) + flat[:, None] * BLOCK_DV + dv[None]
                        accs = accs + (tl.load(part, mask=here[:, None], other=0.0, cache_modifier=".cg"),)
                    m_new = merged_m
                    for i in tl.static_range(MERGE_PARTS):
                        m_new = tl.maximum(m_new, ms[i])
                    shift = tl.where(m_new == NO_KEY, 0.0, m_new)
                    alpha = tl.exp2(merged_m - shift)
                    merged_norm, merged = merged_norm * alpha, merged * alpha[:, None]
                    for i in tl.static_range(MERGE_PARTS):
                        weight = tl.exp2(ms[i] - shift)
                        merged_norm += ls[i] * weight
                        merged += accs[i] * weight[:, None]
                    merged_m = m_new
                _finish(merged, merged_m, merged_norm, out, lse, sinks, row, head, row_mask, out_row_stride, out_head_stride,
                        lse_row_stride, HAS_SINKS, HAS_LSE, V_DIM, BLOCK_DV)  # fmt: skip
        left -= take + ITEM_COST
        items += 1
        block = 0
        kv_head += 1
        if kv_head == KV_HEADS:
            kv_head = 0
            tile += 1
