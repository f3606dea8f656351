"""The forward context of a call in which no paged attention runs."""

from __future__ import annotations

from typing import Any

import torch

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.context import ForwardContext, Recurrent
from paged_attn.attn_ops.kv.kv_pool import KVPool


class NoAttention:
    """Its backend."""

    def plan(self, batch: Batch, pool: KVPool) -> None: ...

    def plan_in_graph(self, plan: Any) -> None: ...

    def forward(self, *_: Any, **__: Any) -> None: ...

    def forward_latent(self, *_: Any) -> None: ...


def without_attention(batch: Batch, dtype: torch.dtype, recurrent: Recurrent | None = None) -> ForwardContext:
    """Of a step, over a pool without layers of this dtype."""
    return ForwardContext(batch, KVPool((), 2, batch.page_size, dtype, batch.slots.device), NoAttention(), recurrent)
