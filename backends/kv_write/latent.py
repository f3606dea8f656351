"""Store a step's new rows of a latent layer, and move its queries' rotated part: one launch on a GPU that has Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.kv_write.store import has_triton, store_kv


def store_latent(
    pool: KVPool, layer_id: int, latent: Tensor, rotated: Tensor | None, batch: Batch, queries: tuple[Tensor, Tensor] | None = None
) -> None:  # fmt: skip
    """Write the first `batch.num_tokens` rows of latent [T, rank] and rotated [T, width] (or none) to `batch.slots`, in the pool's dtype.

    Args:
        queries: the rotated part [T, heads, width] of the step's queries, and where it goes: the end of rows [T, heads, rank + width] with
            their last dim contiguous.
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
