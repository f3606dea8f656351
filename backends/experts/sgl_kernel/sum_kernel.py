"""The weighted sum over each token's experts."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def weighted_sum(parts: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """parts [T, k, H], ids and weights [T, k], all contiguous -> [T, H] in parts' dtype."""
    tokens, top_k, hidden = parts.shape
    output = torch.empty((tokens, hidden), dtype=parts.dtype, device=parts.device)
    sum_weighted[(tokens, triton.cdiv(hidden, BLOCK))](parts, ids, weights, output, EXPERTS=experts, TOP_K=top_k, H=hidden, BLOCK=BLOCK)
    return output


@triton.jit
def sum_weighted(parts, ids, weights, output, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    """`sum_parts` for parts that are not weighted yet. Parts and weights for ids of no expert may hold anything."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP_K):
        served = tl.load(ids + token * TOP_K + j) < EXPERTS
        weight = tl.load(weights + token * TOP_K + j, mask=served, other=0.0).to(tl.float32)
        total += weight * tl.load(parts + (token * TOP_K + j) * H + h, mask=served & (h < H), other=0.0).to(tl.float32)
    tl.store(output + token * H + h, total.to(output.dtype.element_ty), mask=h < H)
