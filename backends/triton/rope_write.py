"""Rotate query and key and store K and V: every element is read once and written once."""

from __future__ import annotations

import triton
from torch import Tensor

from paged_attn.backends.triton.fast_launch import FastKernel, device_index
from paged_attn.backends.triton.tiling import machine_of, power_of_2
from paged_attn.backends.triton.write_kernels import rope_store_kernel

_fast_rope_store = FastKernel(rope_store_kernel)


def rotate_rows(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, query_out: Tensor, keys: Tensor, values: Tensor, slots: Tensor,
    tokens: int, interleaved: bool,
) -> None:  # fmt: skip
    """Shapes as in `attn_ops.rope_op`; keys and values [pages, page_size, kv_heads, dim]; sin has cos's strides, or is made so."""
    if sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    rows, q_heads, qk_dim = query.shape
    kv_heads, v_dim = value.shape[1:]
    block_d, block_dv = power_of_2(qk_dim), power_of_2(v_dim)
    few = rows <= 256
    block_t = 1 if few else max(1, 2048 // max(block_d, block_dv))
    early = few and machine_of(query.device).early  # it takes as long as a launch
    constants = {
        "Q_HEADS": q_heads, "KV_HEADS": kv_heads, "QK_DIM": qk_dim, "V_DIM": v_dim, "PAIRS": cos.shape[1], "INTERLEAVED": interleaved,
        "PAGE_SIZE": keys.shape[1], "BLOCK_T": block_t, "BLOCK_D": block_d, "BLOCK_DV": block_dv, "EARLY": early,
    }  # fmt: skip
    strides = (
        *query.stride(), *key.stride(), *value.stride(), *query_out.stride(), *cos.stride(), keys.stride(0), *keys.stride()[1:3],
        *values.stride()[1:3],
    )  # fmt: skip
    dtypes = (query.dtype, key.dtype, value.dtype, cos.dtype, sin.dtype, query_out.dtype, keys.dtype)
    _fast_rope_store(
        (dtypes, strides, tuple(constants.values())), (triton.cdiv(rows, block_t), q_heads + 2 * kv_heads),
        (query, key, value, cos, sin, query_out, keys, values, slots, tokens, rows, *strides), constants,
        {"num_warps": 1 if few else 4, "launch_pdl": early}, device_index(keys.device),
    )  # fmt: skip
