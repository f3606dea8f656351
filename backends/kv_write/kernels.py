"""The kernels that store K and V in the pool, every element read and written once; or rows of latents, which also move the rotated part
of queries beside their mapped part."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def store_kernel(key, value, keys, values, slots, tokens, key_row_stride, key_head_stride, key_stride, value_row_stride, value_head_stride,
           value_stride, page_stride, key_token_stride, key_pool_head_stride, value_token_stride, value_pool_head_stride,
           QK_DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
           BLOCK_DV: tl.constexpr):  # fmt: skip
    """Grid (blocks of tokens, KV heads)."""
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


@triton.jit(do_not_specialize=["tokens"])
def store_latent_kernel(latent, rotated, rows, slots, query, mapped, tokens, latent_row_stride, latent_stride, rotated_row_stride,
                        rotated_stride, page_stride, token_stride, query_row_stride, query_head_stride, query_stride, mapped_row_stride,
                        mapped_head_stride, HEADS: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, PAGE_SIZE: tl.constexpr,
                        BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """Grid (rows of the step, 1 + blocks of heads): the first program of a token stores its row, the others move its queries.

    latent [T, RANK], rotated [T, ROTATED] and query [T, HEADS, ROTATED] with any strides; rows [pages, PAGE_SIZE, 1, RANK + ROTATED] and
    mapped [T, HEADS, RANK + ROTATED] contiguous in their last dim; slots [T] int64. Rows from `tokens` on are not stored.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    e = tl.arange(0, BLOCK_E)
    if block > 0:
        head = (block - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (head < HEADS)[:, None] & (e < ROTATED)[None, :]
        part = tl.load(query + token * query_row_stride + head[:, None] * query_head_stride + e[None, :] * query_stride, mask=mask)
        tl.store(mapped + token * mapped_row_stride + head[:, None] * mapped_head_stride + (RANK + e)[None, :], part, mask=mask)
    elif token < tokens:
        d = tl.arange(0, BLOCK_R)
        slot = tl.load(slots + token)
        at = rows + (slot // PAGE_SIZE).to(tl.int64) * page_stride + slot % PAGE_SIZE * token_stride
        row = tl.load(latent + token * latent_row_stride + d * latent_stride, mask=d < RANK)
        tl.store(at + d, row.to(rows.dtype.element_ty), mask=d < RANK)
        if ROTATED > 0:
            shared = tl.load(rotated + token * rotated_row_stride + e * rotated_stride, mask=e < ROTATED)
            tl.store(at + RANK + e, shared.to(rows.dtype.element_ty), mask=e < ROTATED)
