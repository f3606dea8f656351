"""The kernels that store K and V in the pool, plain or with the rotation of q and k: every element is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def store_kernel(key, value, keys, values, slots, tokens, key_row_stride, key_head_stride, key_stride, value_row_stride, value_head_stride,
           value_stride, page_stride, key_token_stride, key_pool_head_stride, value_token_stride, value_pool_head_stride,
           KV_HEADS: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
           BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    there = token < tokens
    slot = tl.load(slots + token, mask=there, other=0)
    page = (slot // PAGE_SIZE).to(tl.int64) * page_stride
    offset = slot % PAGE_SIZE
    token = token.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    mask = there[:, None] & (d < QK_DIM)[None, :]
    k = tl.load(key + (token * key_row_stride + head * key_head_stride)[:, None] + d[None, :] * key_stride, mask=mask)
    at = (page + offset * key_token_stride + head * key_pool_head_stride)[:, None] + d[None, :]
    tl.store(keys + at, k.to(keys.dtype.element_ty), mask=mask)
    d = tl.arange(0, BLOCK_DV)
    mask = there[:, None] & (d < V_DIM)[None, :]
    v = tl.load(value + (token * value_row_stride + head * value_head_stride)[:, None] + d[None, :] * value_stride, mask=mask)
    at = (page + offset * value_token_stride + head * value_pool_head_stride)[:, None] + d[None, :]
    tl.store(values + at, v.to(values.dtype.element_ty), mask=mask)


@triton.jit
def _rotated(x, partner, d, cos, sin, token, there, cos_row_stride, cos_stride, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """x [BLOCK_T, BLOCK_D] rotated; `partner` holds each element's other half of its pair."""
    pair = d // 2 if INTERLEAVED else d % PAIRS
    is_first = d % 2 == 0 if INTERLEAVED else d < PAIRS
    turns = d < 2 * PAIRS
    at = (token * cos_row_stride)[:, None] + (pair * cos_stride)[None, :]
    mask = there[:, None] & turns[None, :]
    c = tl.load(cos + at, mask=mask, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=mask, other=0.0).to(tl.float32)
    s = tl.where(is_first[None, :], -s, s)
    return tl.where(turns[None, :], x.to(tl.float32) * c + partner.to(tl.float32) * s, x.to(tl.float32))


@triton.jit(do_not_specialize=["tokens", "rows"])
def rope_store_kernel(query, key, value, cos, sin, query_out, keys, values, slots, tokens, rows,
                query_row_stride, query_head_stride, query_stride, key_row_stride, key_head_stride, key_stride,
                value_row_stride, value_head_stride, value_stride, out_row_stride, out_head_stride, out_stride,
                cos_row_stride, cos_stride, page_stride, key_token_stride, key_pool_head_stride, value_token_stride, value_pool_head_stride,
                Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr, PAIRS: tl.constexpr,
                INTERLEAVED: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_DV: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Grid: blocks of tokens, heads of q, then of k, then of v."""
    if EARLY:  # as `attend`
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    head = tl.program_id(1)
    there = token < tokens
    d = tl.arange(0, BLOCK_D)
    mask = there[:, None] & (d < QK_DIM)[None, :]
    if INTERLEAVED:
        other = d + 1 - 2 * (d % 2)
    else:
        other = tl.where(d < PAIRS, d + PAIRS, d - PAIRS)
    other = tl.where(d < 2 * PAIRS, other, d)
    if head < Q_HEADS:
        base = query + (token * query_row_stride + head * query_head_stride)[:, None]
        x = tl.load(base + (d * query_stride)[None, :], mask=mask, other=0.0)
        partner = tl.load(base + (other * query_stride)[None, :], mask=mask, other=0.0)
        result = _rotated(x, partner, d, cos, sin, token, there, cos_row_stride, cos_stride, PAIRS, INTERLEAVED)
        at = query_out + (token * out_row_stride + head * out_head_stride)[:, None] + (d * out_stride)[None, :]
        tl.store(at, result.to(query_out.dtype.element_ty), mask=(token < rows)[:, None] & (d < QK_DIM)[None, :])
    else:
        slot = tl.load(slots + token, mask=there, other=0)
        page = (slot // PAGE_SIZE).to(tl.int64) * page_stride
        offset = slot % PAGE_SIZE
        if head < Q_HEADS + KV_HEADS:
            kv_head = head - Q_HEADS
            base = key + (token * key_row_stride + kv_head * key_head_stride)[:, None]
            x = tl.load(base + (d * key_stride)[None, :], mask=mask, other=0.0)
            partner = tl.load(base + (other * key_stride)[None, :], mask=mask, other=0.0)
            result = _rotated(x, partner, d, cos, sin, token, there, cos_row_stride, cos_stride, PAIRS, INTERLEAVED).to(
                key.dtype.element_ty
            )
            at = keys + (page + offset * key_token_stride + kv_head * key_pool_head_stride)[:, None] + d[None, :]
            tl.store(at, result.to(keys.dtype.element_ty), mask=mask)
        else:
            kv_head = head - Q_HEADS - KV_HEADS
            dv = tl.arange(0, BLOCK_DV)
            mask = there[:, None] & (dv < V_DIM)[None, :]
            at = value + (token * value_row_stride + kv_head * value_head_stride)[:, None] + (dv * value_stride)[None, :]
            v = tl.load(at, mask=mask, other=0.0)
            at = values + (page + offset * value_token_stride + kv_head * value_pool_head_stride)[:, None] + dv[None, :]
            tl.store(at, v.to(values.dtype.element_ty), mask=mask)
