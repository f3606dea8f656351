"""The forward context of a call in which no paged attention runs."""

from __future__ import annotations

import torch

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.context import ForwardContext, NoAttention, Recurrent
from paged_attn.attn_ops.kv.kv_pool import KVPool


def without_attention(batch: Batch, dtype: torch.dtype, recurrent: Recurrent | None = None) -> ForwardContext:
    """The forward context of a step, over a pool without layers of this dtype."""
    return ForwardContext(batch, KVPool((), 2, batch.page_size, dtype, batch.slots.device), NoAttention(), recurrent)
