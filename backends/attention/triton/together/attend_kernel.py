"""Attention of a decode step in which an item is a KV head of up to MEMBERS requests that share keys.

query [R, q_heads, QK_DIM], one row a request; `ends` as `count_together` leaves it; all else as in `attend_kernel`.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.attention.triton.attend_kernel import finish, scores
from paged_attn.backends.attention.triton.parts import NO_KEY, keep_part, merge_parts


@triton.jit
def _walk_item(q, acc, m, norm, block, last, ends, first, members, seq_lens, page_table, member, row_mask, keys, values,
               table_stride, page_stride, key_token_stride, value_token_stride, scale, softcap, HAS_SOFTCAP: tl.constexpr,
               SEGMENTS: tl.constexpr, HIDDEN: tl.constexpr, PAGE_SIZE: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr,
               BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Blocks [block, last) of an item in one loop: first those that its requests share, then each one's own, without HIDDEN last keys."""
    d, dv, lanes, segments = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_N), tl.arange(0, SEGMENTS)
    # Two loads that wait for nothing, and no look-ups that depend on each other.
    bounds = tl.load(ends + segments, mask=segments <= members, other=1 << 30)
    lengths = tl.load(seq_lens + first + tl.maximum(segments - 1, 0), mask=segments <= members, other=0)
    segment = tl.sum((bounds <= block).to(tl.int32), 0)
    until = tl.sum(tl.where(segments == segment, bounds, 0), 0)
    shared = tl.sum(tl.where(segments == 0, bounds, 0), 0)
    skipped = tl.where(segment > 1, tl.max(tl.where(segments < segment, bounds, 0), 0) - shared, 0)  # own blocks of earlier requests
    request = first + tl.maximum(segment - 1, 0)
    limit = tl.sum(tl.where(segments == segment, lengths, 0), 0) - HIDDEN
    key = (block - skipped) * BLOCK_N + lanes
    page = tl.load(page_table + request.to(tl.int64) * table_stride + key // PAGE_SIZE, mask=key < limit, other=0)
    for next in tl.range(block + 1, last + 1):
        base, there, rows = page.to(tl.int64) * page_stride, key < limit, row_mask & ((member == segment - 1) | (segment == 0))
        token = key % PAGE_SIZE
        # Look-ups for the next block come before waiting for this one's keys.
        skipped = tl.where((next == until) & (segment > 0), next - shared, skipped)
        segment = tl.minimum(segment + (next == until).to(tl.int32), members)
        request = first + tl.maximum(segment - 1, 0)
        until = tl.load(ends + segment)
        limit = tl.load(seq_lens + request) - HIDDEN
        key = (next - skipped) * BLOCK_N + lanes
        page = tl.load(page_table + request.to(tl.int64) * table_stride + key // PAGE_SIZE, mask=(key < limit) & (next < last), other=0)
        k_at = keys + (base + token * key_token_stride)[:, None] + d[None]
        v_at = values + (base + token * value_token_stride)[:, None] + dv[None]
        k = tl.load(k_at, mask=there[:, None] & (d < QK_DIM)[None], other=0.0)
        v = tl.load(v_at, mask=there[:, None] & (dv < V_DIM)[None], other=0.0)
        raw = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        s = scores(raw, scale, softcap, m, m, m, key, 1, rows, HAS_SOFTCAP, False, "none")
        s = tl.where(there[None] & rows[:, None], s, NO_KEY)
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == NO_KEY, 0.0, m_new)
        alpha = tl.exp2(m - shift)
        p = tl.exp2(s - shift[:, None])
        norm = norm * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, norm


@triton.jit(do_not_specialize=["table_stride"])
def attend_together(query, keys, values, out, new_keys, new_values, sinks, lse, page_table, seq_lens, ends, work, partial, partial_stats,
                    counters, table_stride, page_stride, key_token_stride, key_head_stride, value_token_stride,
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
    first, kv_head, block, left = tl.load(mine), tl.load(mine + 2), tl.load(mine + 3), tl.load(mine + 4)
    part_first, part_last, part_slot = tl.load(mine + 5), tl.load(mine + 6), tl.load(mine + 7)
    d, dv, flat = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_M)
    member, head_of = flat // GROUP, flat % GROUP
    items = 0
    while left > 0:
        of_item = ends + first * SEGMENTS
        blocks, members = tl.load(of_item + MEMBERS), tl.load(of_item + SEGMENTS - 1)
        take = tl.minimum(blocks - block, left)
        row = first + member
        row_mask = member < members
        head = kv_head * GROUP + head_of
        q_at = query + (row.to(tl.int64) * query_row_stride)[:, None] + (head * query_head_stride)[:, None] + d[None]
        q = tl.load(q_at, mask=row_mask[:, None] & (d < QK_DIM)[None], other=0.0)
        m = tl.full([BLOCK_M], NO_KEY, tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        head_keys, head_values = keys + kv_head * key_head_stride, values + kv_head * value_head_stride
        if FUSED_WRITE:
            # K and V of a row's new token, if its last block is among these; used after the others, so that nothing waits for it.
            ended = tl.load(of_item + 1 + member, mask=row_mask, other=0)
            has_new = row_mask & (ended > block) & (ended <= block + take)
            new_at = tl.load(seq_lens + row, mask=row_mask, other=1) - 1
            new_page = tl.load(page_table + row.to(tl.int64) * table_stride + new_at // PAGE_SIZE, mask=row_mask, other=0).to(tl.int64)
            new_k_at = new_keys + (row.to(tl.int64) * new_key_row_stride + kv_head * new_key_head_stride)[:, None] + d[None]
            new_v_at = new_values + (row.to(tl.int64) * new_value_row_stride + kv_head * new_value_head_stride)[:, None] + dv[None]
            new_k = tl.load(new_k_at, mask=has_new[:, None] & (d < QK_DIM)[None], other=0.0).to(keys.dtype.element_ty)
            new_v = tl.load(new_v_at, mask=has_new[:, None] & (dv < V_DIM)[None], other=0.0).to(values.dtype.element_ty)
        acc, m, norm = _walk_item(
            q, acc, m, norm, block, block + take, of_item, first, members, seq_lens, page_table, member, row_mask, head_keys,
            head_values, table_stride, page_stride, key_token_stride, value_token_stride, scale, softcap, HAS_SOFTCAP, SEGMENTS,
            1 if FUSED_WRITE else 0, PAGE_SIZE, QK_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION,
        )  # fmt: skip
        if FUSED_WRITE:
            written, in_page = has_new & (head_of == 0), new_at % PAGE_SIZE
            k_at = head_keys + (new_page * page_stride + in_page * key_token_stride)[:, None] + d[None]
            v_at = head_values + (new_page * page_stride + in_page * value_token_stride)[:, None] + dv[None]
            tl.store(k_at, new_k, mask=written[:, None] & (d < QK_DIM)[None])
            tl.store(v_at, new_v, mask=written[:, None] & (dv < V_DIM)[None])
            raw = tl.sum(q.to(tl.float32) * new_k.to(q.dtype).to(tl.float32), 1)
            s = scores(raw[:, None], scale, softcap, m, m, m, tl.arange(0, 1), 1, row_mask, HAS_SOFTCAP, False, "none")
            score = tl.where(has_new, tl.sum(s, 1), NO_KEY)
            m_new = tl.maximum(m, score)
            shift = tl.where(m_new == NO_KEY, 0.0, m_new)
            alpha, weight = tl.exp2(m - shift), tl.exp2(score - shift)
            norm = norm * alpha + weight
            acc = acc * alpha[:, None] + weight[:, None] * new_v.to(q.dtype).to(tl.float32)
            m = m_new
        if take == blocks:
            finish(acc, m, norm, out, lse, sinks, row, head, row_mask, out_row_stride, out_head_stride, lse_row_stride, HAS_SINKS, HAS_LSE,
                    V_DIM, BLOCK_DV)  # fmt: skip
        else:
            slot = 2 * program
            if items > 0:
                slot += 1
                part_slot = slot
                part_first = program
                part_last = tl.load(mine + 16 + 6)
            keep_part(acc, m, norm, partial, partial_stats, slot, row_mask, BLOCK_M, BLOCK_M, BLOCK_DV)
            tl.debug_barrier()
            parts = part_last - part_first + 1
            if tl.atomic_add(counters + part_first, 1, sem="acq_rel") == parts - 1:
                tl.store(counters + part_first, 0)
                merged, merged_m, merged_norm = merge_parts(partial, partial_stats, parts, part_first, part_slot, row_mask, BLOCK_M,
                                                            BLOCK_DV, MERGE_PARTS)  # fmt: skip
                finish(merged, merged_m, merged_norm, out, lse, sinks, row, head, row_mask, out_row_stride, out_head_stride,
                        lse_row_stride, HAS_SINKS, HAS_LSE, V_DIM, BLOCK_DV)  # fmt: skip
        left -= take + ITEM_COST
        items += 1
        block = 0
        kv_head += 1
        if kv_head == KV_HEADS:
            kv_head = 0
            first += members
