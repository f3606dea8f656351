"""Rotary embedding and the store of K and V, in PyTorch: for backends and devices without a kernel for both."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.batch import Batch
from paged_attn.attn_ops.kv_pool import KVPool
from paged_attn.backends.store_kv import has_triton, store_kv


def rope_and_store(
    batch: Batch, pool: KVPool, layer_id: int, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, query_out: Tensor,
    interleaved: bool,
) -> None:  # fmt: skip
    """As `paged_attn.attn_ops.rope_op` says; by one Triton kernel on a GPU that has Triton."""
    if pool.device.type == "cuda" and has_triton():
        from paged_attn.backends.triton.rope_write import rotate_rows

        keys, values = pool.key(layer_id), pool.value(layer_id)
        rotate_rows(query, key, value, cos, sin, query_out, keys, values, batch.slots, batch.num_tokens, interleaved)
        return
    query_out.copy_(rotate(query, cos, sin, interleaved))
    query_out[batch.num_tokens :].zero_()
    store_kv(pool, layer_id, rotate(key, cos, sin, interleaved), value, batch)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, heads, dim] with its first 2 * pairs elements rotated by cos and sin [T, pairs], computed in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = cos.shape[1]
    rotated = x[..., : 2 * pairs].to(wide)
    first, second = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.split(pairs, dim=-1)
    c, s = cos[:, None].to(wide), sin[:, None].to(wide)
    parts = first * c - second * s, second * c + first * s
    joined = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([joined.to(x.dtype), x[..., 2 * pairs :]], dim=-1)
