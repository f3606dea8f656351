"""Stores a step's new K and V, or rows of latents, in the pool, for every backend without its own kernel for that."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.devices import has_triton


def store_kv(pool: KVPool, layer_id: int, key: Tensor, value: Tensor, batch: Batch) -> None:
    """Writes the first `batch.num_tokens` rows of key [T, kv_heads, qk_dim] and value [T, kv_heads, v_dim] to `batch.slots`.

    They are cast to the pool's dtype; by a Triton kernel on a GPU with Triton.
    """
    keys, values, count = pool.key(layer_id), pool.value(layer_id), batch.num_tokens
    if pool.device.type == "cuda" and has_triton():
        from paged_attn.backends.kv_write.launch import store_rows

        store_rows(key, value, keys, values, batch.slots, count)
        return
    index = (batch.slots[:count] // batch.page_size, batch.slots[:count] % batch.page_size)
    keys.index_put_(index, key[:count].to(pool.dtype))
    values.index_put_(index, value[:count].to(pool.dtype))


def store_latent(
    pool: KVPool, layer_id: int, latent: Tensor, rotated: Tensor | None, batch: Batch, queries: tuple[Tensor, Tensor] | None = None
) -> None:  # fmt: skip
    """Writes the first `batch.num_tokens` rows of latent [T, rank] and rotated [T, width] (or none) to `batch.slots`, in the pool's dtype.

    Args:
        queries: the rotated part [T, heads, width] of the step's queries, and its destination: the end of rows [T, heads, rank + width]
            that are contiguous in their last dim.
    """
    if pool.device.type == "cuda" and has_triton():
        from paged_attn.backends.kv_write.launch import store_latent_rows

        store_latent_rows(latent, rotated, pool.key(layer_id), batch.slots, batch.num_tokens, queries)
        return
    rank = latent.shape[1]
    key = (latent if rotated is None else torch.cat((latent, rotated), -1))[:, None]
    store_kv(pool, layer_id, key, key[..., :rank], batch)
    if queries is not None:
        queries[1][..., rank:] = queries[0]
