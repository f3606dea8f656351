"""Store a step's new K and V in the pool: the one way for every backend that has no kernel of its own for it."""

from __future__ import annotations

import importlib.util
from functools import cache

from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.kv.kv_pool import KVPool


def store_kv(pool: KVPool, layer_id: int, key: Tensor, value: Tensor, batch: Batch) -> None:
    """Write the first `batch.num_tokens` rows of key [T, kv_heads, qk_dim] and value [T, kv_heads, v_dim] to `batch.slots`.

    Cast to the pool's dtype; by a Triton kernel on a GPU that has Triton.
    """
    keys, values, count = pool.key(layer_id), pool.value(layer_id), batch.num_tokens
    if pool.device.type == "cuda" and has_triton():
        from paged_attn.backends.kv_write.launch import store_rows

        store_rows(key, value, keys, values, batch.slots, count)
        return
    index = (batch.slots[:count] // batch.page_size, batch.slots[:count] % batch.page_size)
    keys.index_put_(index, key[:count].to(pool.dtype))
    values.index_put_(index, value[:count].to(pool.dtype))


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
