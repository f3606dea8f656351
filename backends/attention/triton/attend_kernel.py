"""The attention kernel: paged, ragged, split by stream-K, merged by the program that finishes an item last.

Each query row gets softmax(softcap(scale * q.K) + bias) @ V over the keys that it sees. These are read in place through the page table.
The softmax is the online softmax in base 2 (Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867; FlashAttention-2,
https://arxiv.org/abs/2307.08691).

    query [T, q_heads, QK_DIM], out [T, q_heads, V_DIM]                    any strides
    keys, values [pages, PAGE_SIZE, kv_heads, dim]                         any page, token and head strides; dim is contiguous
    page_table [requests, columns], seq_lens [requests], query_start [requests + 1]    int32
    work                                                                   see plan_kernels

A program walks through its share of the work, item by item. If an item is cut, each of its programs leaves (acc, m, norm) of its part in
`partial` [2 * programs, KEEP_ROWS, BLOCK_DV] and `partial_stats` [2 * programs, 2, KEEP_ROWS]. The program that adds the last part merges
them.

FUSED_WRITE, for one new token per request: the new K and V come from `new_keys` and `new_values` [T, kv_heads, dim]. The program with the
item's last part stores them in the pool.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.attention.triton.parts import NO_KEY, keep_part, merge_parts
from paged_attn.backends.attention.triton.tiles import first_item, next_item, tile_keys

LOG2E = tl.constexpr(1.4426950408889634)
LEAST_BIAS = tl.constexpr(-3.0e38)  # hides a key like -inf, but subtracting it from itself does not give NaN


@triton.jit
def scores(raw, scale, softcap, slope, bias_rows, position, keys, bias_width, bias_mask,
            HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Raw products q.k -> scores in base 2, like `_softmax` in hopper/consumer.py; position [rows], keys [keys]; all broadcast to raw."""
    if HAS_SOFTCAP:
        x = raw * (scale / softcap)
        s = (softcap * LOG2E) * (1 - 2 / (tl.exp(2 * x) + 1))
    else:
        s = raw * (scale * LOG2E)
    if HAS_ALIBI:
        s += (slope * LOG2E)[:, None] * (keys[None, :] - position[:, None]).to(tl.float32)
    if BIAS != "none":
        if BIAS == "distance":
            bias_column = tl.minimum(tl.maximum(position[:, None] - keys[None, :], 0), bias_width - 1)
        else:
            bias_column = tl.minimum(keys[None, :] + position[:, None] * 0, bias_width - 1)
        biased = LOG2E * tl.load(bias_rows[:, None] + bias_column, mask=bias_mask[:, None], other=0.0).to(tl.float32)
        s += tl.maximum(biased, LEAST_BIAS, propagate_nan=tl.PropagateNan.ALL)
    return s


@triton.jit
def _read(at, there, d, WHOLE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Keys or values [keys, BLOCK] at addresses `at`, with zeros where there are none. WHOLE: all keys are `there`."""
    if WHOLE and DIM == BLOCK:
        read = tl.load(at)
    elif DIM == BLOCK:
        read = tl.load(at, mask=there[:, None], other=0.0)
    else:
        read = tl.load(at, mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    return read


@triton.jit
def _add_block(q, k, v, acc, m, norm, key, end, position, scale, softcap, slope, bias_rows, bias_width, row_mask, window, chunk,
               MASK: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
               HAS_ALIBI: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Adds keys `key` [keys] to the sums of all rows. MASK: see `_walk`."""
    raw = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    s = scores(raw, scale, softcap, slope, bias_rows, position, key, bias_width, row_mask, HAS_SOFTCAP, HAS_ALIBI, BIAS)
    if MASK != "none":
        seen = (key < end)[None, :]
        if MASK == "all":
            if CAUSAL:
                seen = seen & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            if CHUNKS == "intra":
                seen = seen & (key[None, :] // chunk == position[:, None] // chunk)
            if CHUNKS == "successive":
                seen = seen & (key[None, :] // chunk == position[:, None] // chunk - 1)
            if CHUNKS == "inter":
                seen = seen & (key[None, :] // chunk < position[:, None] // chunk - 1)
        s = tl.where(seen, s, NO_KEY)
    m_new = tl.maximum(m, tl.max(s, 1))
    if MASK == "all":  # a row may not have seen a key yet
        shift = tl.where(m_new == NO_KEY, 0.0, m_new)
    else:
        shift = m_new
    alpha = tl.exp2(m - shift)
    p = tl.exp2(s - shift[:, None])
    norm = norm * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
    return acc, m_new, norm


@triton.jit
def _walk(q, acc, m, norm, begin, end, table, keys, values, page_stride, key_token_stride, value_token_stride,
          position, scale, softcap, slope, bias_rows, bias_width, row_mask, window, chunk,
          MASK: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
          HAS_ALIBI: tl.constexpr, BIAS: tl.constexpr, PAGE_SIZE: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr,
          BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Keys [begin, end), a block at a time. MASK: "none", "length" (only `end` bounds) or "all" (causal, window, chunk)."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    # A block's pages are looked up one block ahead: a look-up inside the loop would take a pipeline stage away from K and V.
    key = begin + tl.arange(0, BLOCK_N)
    page = tl.load(table + key // PAGE_SIZE, mask=key < end, other=0)
    for start in tl.range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        base = page.to(tl.int64) * page_stride
        token = key % PAGE_SIZE
        there = key < end
        if MASK == "all" and (HAS_WINDOW or CHUNKS != "none"):  # pages before the first visible key may have been freed
            there = there & (page > 0)
        page = tl.load(table + (key + BLOCK_N) // PAGE_SIZE, mask=key + BLOCK_N < end, other=0)
        k = _read(keys + (base + token * key_token_stride)[:, None] + d[None, :], there, d, MASK == "none", QK_DIM, BLOCK_D)
        v = _read(values + (base + token * value_token_stride)[:, None] + dv[None, :], there, dv, MASK == "none", V_DIM, BLOCK_DV)
        acc, m, norm = _add_block(q, k, v, acc, m, norm, key, end, position, scale, softcap, slope, bias_rows, bias_width, row_mask, window,
                                  chunk, MASK, CAUSAL, HAS_WINDOW, CHUNKS, HAS_SOFTCAP, HAS_ALIBI, BIAS, PRECISION)  # fmt: skip
    return acc, m, norm


@triton.jit
def _first_block(keys, values, table, tile, kv_head, block, left, query_len, seq_len, window, chunk, page_stride, key_token_stride,
                 key_head_stride, value_token_stride, value_head_stride, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
                 HAS_WINDOW: tl.constexpr, CHUNKS: tl.constexpr, ALIGN: tl.constexpr, PAGE_SIZE: tl.constexpr, QK_DIM: tl.constexpr,
                 V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                 BLOCK_DV: tl.constexpr):  # fmt: skip
    """The first keys of a program's first item, and their K and V, all from the pool: not the token of this step, which is the last one."""
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    _, _, low, high = tile_keys(tile, query_len, seq_len, window, chunk, GROUP, CAUSAL, HAS_WINDOW, CHUNKS, BLOCK_M, ALIGN)
    key = low + block * BLOCK_N + tl.arange(0, BLOCK_N)
    there = (key < high) & (key < seq_len - 1) & (left > 0)
    base = tl.load(table + key // PAGE_SIZE, mask=there, other=0).to(tl.int64) * page_stride
    token = key % PAGE_SIZE
    k_at = keys + kv_head * key_head_stride + (base + token * key_token_stride)[:, None] + d[None, :]
    v_at = values + kv_head * value_head_stride + (base + token * value_token_stride)[:, None] + dv[None, :]
    return key, _read(k_at, there, d, False, QK_DIM, BLOCK_D), _read(v_at, there, dv, False, V_DIM, BLOCK_DV)


@triton.jit
def finish(acc, m, norm, out, lse, sinks, row, head, mask, out_row_stride, out_head_stride, lse_row_stride,
            HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, V_DIM: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """Normalizes and writes rows of the output; row and head [rows] are their indices."""
    dv = tl.arange(0, BLOCK_DV)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=mask, other=0.0).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, sink)
        alpha = tl.exp2(m - m_new)
        norm = norm * alpha + tl.exp2(sink - m_new)
        acc = acc * alpha[:, None]
        m = m_new
    result = acc / norm[:, None]
    at = out + (row.to(tl.int64) * out_row_stride)[:, None] + (head * out_head_stride)[:, None] + dv[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=mask[:, None] & (dv < V_DIM)[None, :])
    if HAS_LSE:
        tl.store(lse + row.to(tl.int64) * lse_row_stride + head, (m + tl.log2(norm)) / LOG2E, mask=mask)


@triton.jit(do_not_specialize=["table_stride", "window", "chunk", "bias_width"])
def attend(query, keys, values, out, new_keys, new_values, sinks, slopes, bias, lse,
           page_table, seq_lens, query_start, work, partial, partial_stats, counters,
           table_stride, page_stride, key_token_stride, key_head_stride, value_token_stride, value_head_stride,
           query_row_stride, query_head_stride, out_row_stride, out_head_stride, new_key_row_stride, new_key_head_stride,
           new_value_row_stride, new_value_head_stride, lse_row_stride, bias_head_stride, bias_width, scale, softcap, window, chunk,
           KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
           ROWS: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
           HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr, BIAS: tl.constexpr, HAS_LSE: tl.constexpr, FUSED_WRITE: tl.constexpr,
           ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
           KEEP_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
           FIRST_BLOCK_EARLY: tl.constexpr, ITEM_COST: tl.constexpr):  # fmt: skip
    """One layer; grid (programs,). scale and softcap are floats; the other sizes are in elements.

    EARLY: launched before the previous kernel has ended (PDL). FIRST_BLOCK_EARLY, only with FUSED_WRITE: reads what earlier steps wrote
    before it waits for that kernel.
    """
    if EARLY and not FIRST_BLOCK_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    mine = work + program * 16
    request, tile, kv_head, block, left, start, query_len, seq_len = first_item(mine)
    part_first = tl.load(mine + 5)
    part_last = tl.load(mine + 6)
    part_slot = tl.load(mine + 7)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    if FIRST_BLOCK_EARLY:
        early_key, early_k, early_v = _first_block(
            keys, values, page_table + request.to(tl.int64) * table_stride, tile, kv_head, block, left, query_len, seq_len, window, chunk,
            page_stride, key_token_stride, key_head_stride, value_token_stride, value_head_stride, GROUP, CAUSAL, HAS_WINDOW, CHUNKS,
            ALIGN, PAGE_SIZE, QK_DIM, V_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        if EARLY:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    items = 0
    while left > 0:
        first, last, low, high = tile_keys(tile, query_len, seq_len, window, chunk, GROUP, CAUSAL, HAS_WINDOW, CHUNKS, BLOCK_M, ALIGN)
        blocks = tl.cdiv(high - low, BLOCK_N)
        take = tl.minimum(blocks - block, left)

        flat = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = flat < query_len * GROUP
        row = start + flat // GROUP
        head = kv_head * GROUP + flat % GROUP
        position = seq_len - query_len + flat // GROUP
        q_at = query + (row.to(tl.int64) * query_row_stride)[:, None] + (head * query_head_stride)[:, None] + d[None, :]
        q = tl.load(q_at, mask=row_mask[:, None] & (d < QK_DIM)[None, :], other=0.0)
        slope = tl.zeros([BLOCK_M], tl.float32)
        if HAS_ALIBI:
            slope = tl.load(slopes + head, mask=row_mask, other=0.0)
        bias_rows = bias + head * bias_head_stride

        end = tl.minimum(high, low + (block + take) * BLOCK_N)
        m = tl.full([BLOCK_M], NO_KEY, tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        table = page_table + request.to(tl.int64) * table_stride
        head_keys = keys + kv_head * key_head_stride
        head_values = values + kv_head * value_head_stride
        if FUSED_WRITE:
            # One part has the new token, so nothing reads it from the pool. It is loaded here and used after the other keys, so that
            # nothing waits for it.
            has_new = block + take == blocks
            new_at = seq_len - 1
            end = tl.where(has_new, new_at, end)
            new_row = start.to(tl.int64)
            new_page = tl.load(table + new_at // PAGE_SIZE, mask=has_new, other=0).to(tl.int64)
            new_k = tl.load(new_keys + new_row * new_key_row_stride + kv_head * new_key_head_stride + d,
                            mask=has_new & (d < QK_DIM), other=0.0).to(keys.dtype.element_ty)  # fmt: skip
            new_v = tl.load(new_values + new_row * new_value_row_stride + kv_head * new_value_head_stride + dv,
                            mask=has_new & (dv < V_DIM), other=0.0).to(values.dtype.element_ty)  # fmt: skip

        begin = low + block * BLOCK_N
        if FIRST_BLOCK_EARLY:
            if (items == 0) & (begin < end):
                acc, m, norm = _add_block(q, early_k, early_v, acc, m, norm, early_key, end, position, scale, softcap, slope, bias_rows,
                                          bias_width, row_mask, window, chunk, "length", CAUSAL, HAS_WINDOW, CHUNKS, HAS_SOFTCAP, HAS_ALIBI,
                                          BIAS, PRECISION)  # fmt: skip
                begin += BLOCK_N
        if ROWS != "more":  # one query sees all of its keys; with "all", every block is masked, so that all rows run the same code
            acc, m, norm = _walk(
                q, acc, m, norm, begin, end, table, head_keys, head_values, page_stride, key_token_stride, value_token_stride, position,
                scale, softcap, slope, bias_rows, bias_width, row_mask, window, chunk, "length" if ROWS == "one" else "all", CAUSAL,
                HAS_WINDOW, CHUNKS, HAS_SOFTCAP, HAS_ALIBI, BIAS, PAGE_SIZE, QK_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION,
            )  # fmt: skip
        else:
            # Blocks that every row sees whole are between `clear` and `mixed`; those before and after need the mask.
            clear = begin
            if HAS_WINDOW or CHUNKS != "none":
                seen_by_last = low
                if HAS_WINDOW:
                    seen_by_last = tl.maximum(seen_by_last, last - window + 1)
                if CHUNKS == "intra":
                    seen_by_last = tl.maximum(seen_by_last, last // chunk * chunk)
                if CHUNKS == "successive":
                    seen_by_last = tl.maximum(seen_by_last, (last // chunk - 1) * chunk)
                clear = low + tl.cdiv(seen_by_last - low, BLOCK_N) * BLOCK_N
            mixed = end
            if CAUSAL:
                mixed = tl.minimum(mixed, first + 1)
            if CHUNKS == "intra":
                mixed = tl.minimum(mixed, (first // chunk + 1) * chunk)
            if CHUNKS == "successive":
                mixed = tl.minimum(mixed, first // chunk * chunk)
            if CHUNKS == "inter":
                mixed = tl.minimum(mixed, (first // chunk - 1) * chunk)
            mixed = low + tl.maximum(mixed - low, 0) // BLOCK_N * BLOCK_N
            clear = tl.minimum(tl.maximum(clear, begin), end)
            mixed = tl.minimum(tl.maximum(mixed, clear), end)
            bounds = (begin, clear, mixed, end)
            for phase in tl.static_range(0 if HAS_WINDOW or CHUNKS != "none" else 1, 3):
                acc, m, norm = _walk(
                    q, acc, m, norm, bounds[phase], bounds[phase + 1], table, head_keys, head_values, page_stride, key_token_stride,
                    value_token_stride, position, scale, softcap, slope, bias_rows, bias_width, row_mask, window, chunk,
                    "none" if phase == 1 else "all", CAUSAL, HAS_WINDOW, CHUNKS, HAS_SOFTCAP, HAS_ALIBI, BIAS, PAGE_SIZE, QK_DIM, V_DIM,
                    BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION,
                )  # fmt: skip

        if FUSED_WRITE:
            if has_new:
                in_page = new_at % PAGE_SIZE
                tl.store(head_keys + new_page * page_stride + in_page * key_token_stride + d, new_k, mask=d < QK_DIM)
                tl.store(head_values + new_page * page_stride + in_page * value_token_stride + dv, new_v, mask=dv < V_DIM)
                raw = tl.sum(q.to(tl.float32) * new_k.to(q.dtype).to(tl.float32)[None, :], 1)
                s = scores(raw[:, None], scale, softcap, slope, bias_rows, position, new_at + tl.arange(0, 1), bias_width, row_mask,
                            HAS_SOFTCAP, HAS_ALIBI, BIAS)  # fmt: skip
                score = tl.sum(s, 1)
                m_new = tl.maximum(m, score)
                alpha = tl.exp2(m - m_new)
                weight = tl.exp2(score - m_new)
                norm = norm * alpha + weight
                acc = acc * alpha[:, None] + weight[:, None] * new_v.to(q.dtype).to(tl.float32)[None, :]
                m = m_new
        if take == blocks:
            finish(acc, m, norm, out, lse, sinks, row, head, row_mask, out_row_stride, out_head_stride, lse_row_stride, HAS_SINKS, HAS_LSE,
                    V_DIM, BLOCK_DV)  # fmt: skip
        else:
            slot = 2 * program
            if items > 0:  # the item starts here: its parts belong to this program and those after it
                slot += 1
                part_slot = slot
                part_first = program
                part_last = tl.load(mine + 16 + 6)
            keep = tl.arange(0, BLOCK_M) < KEEP_ROWS
            keep_part(acc, m, norm, partial, partial_stats, slot, keep, KEEP_ROWS, BLOCK_M, BLOCK_DV)
            tl.debug_barrier()  # every thread must have written its part before the counting thread announces it
            parts = part_last - part_first + 1
            if tl.atomic_add(counters + part_first, 1, sem="acq_rel") == parts - 1:
                tl.store(counters + part_first, 0)
                kept = tile * BLOCK_M + tl.arange(0, KEEP_ROWS)
                mask = kept < query_len * GROUP
                merged, merged_m, merged_norm = merge_parts(partial, partial_stats, parts, part_first, part_slot, mask, KEEP_ROWS, BLOCK_DV,
                                                            MERGE_PARTS)  # fmt: skip
                finish(merged, merged_m, merged_norm, out, lse, sinks, start + kept // GROUP, kv_head * GROUP + kept % GROUP, mask,
                        out_row_stride, out_head_stride, lse_row_stride, HAS_SINKS, HAS_LSE, V_DIM, BLOCK_DV)  # fmt: skip

        left -= take + ITEM_COST
        items += 1
        block = 0
        request, tile, kv_head, start, query_len, seq_len = next_item(request, tile, kv_head, start, query_len, seq_len, left, query_start,
                                                                      seq_lens, KV_HEADS, GROUP, ROWS, BLOCK_M)  # fmt: skip
