"""Attention of all heads to one row per token, read once: the whole row is the key, and its first RANK elements are the value.

Each query row gets softmax(scale * (q.latent + q_rotated.rotated)) @ latent over the tokens up to its own. Rows are read in place through
the page table; the softmax is that of `attend_kernel` of the room above (online, in base 2). That kernel would load K and V of a row of
512 + 64 as two tiles of 1,024 and 512 columns. Here a tile of 512 lies in shared memory once, and both products read it there.

query [T, GROUP, RANK + ROTATED], out [T, GROUP, RANK], last dim contiguous; lse [T, GROUP] float32; rows [pages, PAGE_SIZE, 1,
RANK + ROTATED] with any page and token strides; page_table [requests, columns], seq_lens [requests], query_start [requests + 1] int32;
work: see plan_kernels. A program walks through its share of the work, item by item. A whole item is written to `out`; a cut one leaves
(acc, m, norm) of its part in `partial` [2 * programs, KEEP_ROWS, BLOCK_R] and `partial_stats` [2 * programs, 2, KEEP_ROWS], float32, for
`merge_latent`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.attention.triton.tiles import first_item, next_item, tile_keys

LOG2E = tl.constexpr(1.4426950408889634)
NO_KEY = tl.constexpr(float("-inf"))


@triton.jit
def _walk(q, q_rotated, begin, end, table, rows, page_stride, token_stride, position, scale,
          PAGE_SIZE: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
          BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Tokens [begin, end), a block at a time -> weighted sums of latents [BLOCK_M, BLOCK_R], largest scores and norms [BLOCK_M]."""
    d = tl.arange(0, BLOCK_R)
    e = tl.arange(0, BLOCK_E)
    m = tl.full([BLOCK_M], NO_KEY, tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    # A block's pages are looked up one block ahead: a look-up inside the loop would take a pipeline stage away from the rows.
    key = begin + tl.arange(0, BLOCK_N)
    page = tl.load(table + key // PAGE_SIZE, mask=key < end, other=0)
    for start in tl.range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        at = rows + (page.to(tl.int64) * page_stride + key % PAGE_SIZE * token_stride)[:, None]
        page = tl.load(table + (key + BLOCK_N) // PAGE_SIZE, mask=key + BLOCK_N < end, other=0)
        if RANK == BLOCK_R:
            latent = tl.load(at + d[None, :], mask=(key < end)[:, None], other=0.0)
        else:
            latent = tl.load(at + d[None, :], mask=(key < end)[:, None] & (d < RANK)[None, :], other=0.0)
        latent = latent.to(q.dtype)
        raw = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        if ROTATED > 0:
            if ROTATED == BLOCK_E:
                rotated = tl.load(at + (RANK + e)[None, :], mask=(key < end)[:, None], other=0.0)
            else:
                rotated = tl.load(at + (RANK + e)[None, :], mask=(key < end)[:, None] & (e < ROTATED)[None, :], other=0.0)
            raw = tl.dot(q_rotated, tl.trans(rotated.to(q.dtype)), raw, input_precision=PRECISION)
        seen = (key < end)[None, :] & (key[None, :] <= position[:, None])
        s = tl.where(seen, raw * (scale * LOG2E), NO_KEY)
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == NO_KEY, 0.0, m_new)  # a row may not have seen a token yet
        alpha = tl.exp2(m - shift)
        p = tl.exp2(s - shift[:, None])
        norm = norm * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), latent, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, norm


@triton.jit(do_not_specialize=["table_stride"])
def attend_latent(query, rows, out, lse, page_table, seq_lens, query_start, work, partial, partial_stats, table_stride, page_stride,
                  token_stride, query_row_stride, query_head_stride, out_row_stride, out_head_stride, lse_row_stride, scale,
                  GROUP: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr,
                  HAS_LSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
                  KEEP_ROWS: tl.constexpr, ITEM_COST: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One layer; grid (programs,). scale is a float; the other sizes are in elements."""
    program = tl.program_id(0)
    mine = work + program * 16
    request, tile, kv_head, block, left, start, query_len, seq_len = first_item(mine)
    d = tl.arange(0, BLOCK_R)
    e = tl.arange(0, BLOCK_E)
    items = 0
    while left > 0:
        _, _, _, high = tile_keys(tile, query_len, seq_len, 0, 0, GROUP, True, False, "none", BLOCK_M, 0)
        blocks = tl.cdiv(high, BLOCK_N)
        take = tl.minimum(blocks - block, left)

        flat = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = flat < query_len * GROUP
        row = start + flat // GROUP
        head = flat % GROUP
        position = seq_len - query_len + flat // GROUP
        q_at = query + (row.to(tl.int64) * query_row_stride + head * query_head_stride)[:, None]
        q = tl.load(q_at + d[None, :], mask=row_mask[:, None] & (d < RANK)[None, :], other=0.0)
        q_rotated = q
        if ROTATED > 0:
            q_rotated = tl.load(q_at + (RANK + e)[None, :], mask=row_mask[:, None] & (e < ROTATED)[None, :], other=0.0)
        table = page_table + request.to(tl.int64) * table_stride
        end = tl.minimum(high, (block + take) * BLOCK_N)
        acc, m, norm = _walk(q, q_rotated, block * BLOCK_N, end, table, rows, page_stride, token_stride, position, scale, PAGE_SIZE, RANK,
                             ROTATED, BLOCK_M, BLOCK_N, BLOCK_R, BLOCK_E, PRECISION)  # fmt: skip

        if take == blocks:
            result = (acc / norm[:, None]).to(out.dtype.element_ty)
            out_at = out + (row.to(tl.int64) * out_row_stride + head * out_head_stride)[:, None] + d[None, :]
            tl.store(out_at, result, mask=row_mask[:, None] & (d < RANK)[None, :])
            if HAS_LSE:
                tl.store(lse + row.to(tl.int64) * lse_row_stride + head, (m + tl.log2(norm)) / LOG2E, mask=row_mask)
        else:
            slot = 2 * program
            if items > 0:  # the item starts here
                slot += 1
            kept = tl.arange(0, BLOCK_M)
            keep = kept < KEEP_ROWS
            tl.store(partial + slot.to(tl.int64) * (KEEP_ROWS * BLOCK_R) + kept[:, None] * BLOCK_R + d[None, :], acc, mask=keep[:, None])
            tl.store(partial_stats + slot * (2 * KEEP_ROWS) + kept, m, mask=keep)
            tl.store(partial_stats + slot * (2 * KEEP_ROWS) + KEEP_ROWS + kept, norm, mask=keep)

        left -= take + ITEM_COST
        items += 1
        block = 0
        request, tile, kv_head, start, query_len, seq_len = next_item(request, tile, kv_head, start, query_len, seq_len, left, query_start,
                                                                      seq_lens, 1, GROUP, ROWS, BLOCK_M)  # fmt: skip
