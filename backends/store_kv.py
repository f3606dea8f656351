"""Store a step's new K and V in the pool: the one way for every backend that has no kernel of its own for it."""

from __future__ import annotations

from torch import Tensor

from paged_attn.attn_ops.batch import Batch
from paged_attn.attn_ops.kv_pool import KVPool


def store_kv(pool: KVPool, layer_id: int, key: Tensor, value: Tensor, batch: Batch) -> None:
    """Write the first `batch.num_tokens` rows of key [T, kv_heads, qk_dim] and value [T, kv_heads, v_dim] to `batch.slots`, cast to the pool's dtype."""
    count = batch.num_tokens
    index = (batch.slots[:count] // batch.page_size, batch.slots[:count] % batch.page_size)
    pool.key(layer_id).index_put_(index, key[:count].to(pool.dtype))
    pool.value(layer_id).index_put_(index, value[:count].to(pool.dtype))
