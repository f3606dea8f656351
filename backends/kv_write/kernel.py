"""The kernel that stores K and V in the pool: every element is read once and written once."""

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
