"""Launches the kernels that store a step's new K and V, or latents, in the pool."""

from __future__ import annotations

from torch import Tensor

from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.kv_write.kernels import store_kernel, store_latent_kernel
from paged_attn.backends.machine import blocks_of, power_of_2

_fast_store, _fast_store_latent = FastKernel(store_kernel), FastKernel(store_latent_kernel)


def store_rows(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, tokens: int) -> None:
    """Writes rows [0, tokens) of key [T, kv_heads, qk_dim] and value [T, kv_heads, v_dim], any strides, into keys and values
    [pages, page_size, kv_heads, dim] at slots [T] int64, cast to their dtype."""
    if tokens == 0:
        return
    kv_heads, qk_dim, v_dim = key.shape[1], key.shape[2], value.shape[2]
    block_d, block_dv = power_of_2(qk_dim), power_of_2(v_dim)
    block_t = max(1, 2048 // max(block_d, block_dv)) if tokens > 256 else 1
    strides = (*key.stride(), *value.stride(), keys.stride(0), *keys.stride()[1:3], *values.stride()[1:3])
    constants = {
        "QK_DIM": qk_dim, "V_DIM": v_dim, "PAGE_SIZE": keys.shape[1], "BLOCK_T": block_t, "BLOCK_D": block_d, "BLOCK_DV": block_dv,
    }  # fmt: skip
    _fast_store(
        (key.dtype, value.dtype, keys.dtype, strides, tuple(constants.values())), (blocks_of(tokens, block_t), kv_heads),
        (key, value, keys, values, slots, tokens, *strides), constants, {"num_warps": 4 if block_t > 1 else 1}, device_index(keys.device),
    )  # fmt: skip


def store_latent_rows(
    latent: Tensor, rotated: Tensor | None, rows: Tensor, slots: Tensor, tokens: int, queries: tuple[Tensor, Tensor] | None
) -> None:  # fmt: skip
    """`store_latent` as a Triton kernel; rows [pages, page_size, 1, rank + width]."""
    total, rank = latent.shape
    if total == 0:
        return
    width = 0 if rotated is None else rotated.shape[1]
    shared = latent if rotated is None else rotated
    query, mapped = queries if queries and width else (latent[:, None], latent[:, None])
    heads = query.shape[1] if queries and width else 0
    strides = (*latent.stride(), *shared.stride(), *rows.stride()[:2], *query.stride(), *mapped.stride()[:2])
    block_h = min(16, power_of_2(max(heads, 1)))
    constants = {
        "HEADS": heads, "RANK": rank, "ROTATED": width, "PAGE_SIZE": rows.shape[1], "BLOCK_H": block_h,
        "BLOCK_R": power_of_2(rank), "BLOCK_E": power_of_2(max(width, 1)),
    }  # fmt: skip
    _fast_store_latent(
        (latent.dtype, rows.dtype, query.dtype, strides, tuple(constants.values())), (total, 1 + blocks_of(heads, block_h)),
        (latent, shared, rows, slots, query, mapped, tokens, *strides), constants, {"num_warps": 2}, device_index(rows.device),
    )  # fmt: skip
