"""`paged_attn.forward_context`: the public way into a step."""

from __future__ import annotations

from paged_attn.attn_ops.batch import Batch
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.kv_pool import KVPool
from paged_attn.backends.base import AttentionBackend
from paged_attn.backends.select import select_for_pool


def forward_context(batch: Batch, pool: KVPool, backend: str | AttentionBackend = "auto") -> ForwardContext:
    """`with forward_context(batch, pool): logits = compiled(**batch.model_inputs()).logits`

    Args:
        batch: what this step runs; build it with the pool's page size.
        pool: where K and V live; allocated for the model's layers.
        backend: "auto", a registered name, or a backend object (select once and reuse it in a loop).

    Raises:
        ValueError: an unknown backend name.
        UnsupportedError: the backend can not run some layer; the message says why.
        ContextError: batch and pool disagree; or, on use, the context is entered twice or left out of order.
    """
    chosen = select_for_pool(backend, pool).backend if isinstance(backend, str) else backend
    return ForwardContext(batch, pool, chosen)
