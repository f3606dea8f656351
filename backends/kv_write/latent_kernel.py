"""The kernel that stores rows of latents in the pool and moves the rotated part of queries beside their mapped part."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def store_latent_kernel(latent, rotated, rows, slots, query, mapped, tokens, latent_row_stride, latent_stride, rotated_row_stride,
                        rotated_stride, page_stride, token_stride, query_row_stride, query_head_stride, query_stride, mapped_row_stride,
                        mapped_head_stride, HEADS: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, PAGE_SIZE: tl.constexpr,
                        BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """Grid (rows of the step, 1 + blocks of heads): the first program of a token stores its row, the others move its queries.

    latent [T, RANK], rotated [T, ROTATED] and query [T, HEADS, ROTATED] with any strides; rows [pages, PAGE_SIZE, 1, RANK + ROTATED] and
    mapped [T, HEADS, RANK + ROTATED] with their last dim contiguous; slots [T] int64. Of rows past `tokens` nothing is stored.
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
