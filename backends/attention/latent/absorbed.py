"""Queries meet the latent by W_UK, and outputs come back by W_UV: what a backend attends to is one KV head of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.specs.latent import LatentSpec


def mapped_queries(spec: LatentSpec, query: Tensor, weight_k: Tensor) -> Tensor:
    """Queries [T, heads, key_dim + rotated] as [T, heads, rank + rotated], whose product with a row is that with the head's key.

    Their last `rotated` elements are the queries' own, and not written yet.
    """
    plain, _ = spec.split(query)
    mapped = query.new_empty((query.shape[0], spec.num_q_heads, spec.qk_head_dim))
    maps = spec.keys.of(weight_k, spec.num_q_heads, spec.key_dim)  # [heads, key_dim, rank]
    with torch.no_grad():
        torch.bmm(plain.transpose(0, 1), maps, out=mapped[..., : spec.rank].transpose(0, 1))
    return mapped


def mapped_back(spec: LatentSpec, sums: Tensor, weight_v: Tensor, output: Tensor) -> None:
    """Weighted sums of latents [T, heads, rank] into output [T, heads, value_dim]."""
    maps = spec.values.of(weight_v, spec.num_q_heads, spec.value_dim)  # [heads, value_dim, rank]
    with torch.no_grad():
        torch.bmm(sums.transpose(0, 1), maps.transpose(1, 2), out=output.transpose(0, 1))
