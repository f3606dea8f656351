"""`torch.ops.paged_attn.experts`: computes each token's chosen experts and adds them up with their weights.

It reads nothing but its operands, so it stays inside a piece and inside captured graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.ops.define import define_op, like_first
from paged_attn.attn_ops.specs.experts import Gating

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Gating], Tensor]
ONE_BY_ONE = "one_by_one"
_backends: Callable[[str], Experts] | None = None


def use_experts(backends: Callable[[str], Experts]) -> None:
    """Set the function that returns a backend's implementation by name; ONE_BY_ONE does not need it."""
    global _backends
    _backends = backends


def experts_one_by_one(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating
) -> Tensor:
    """Computes one expert after the other, in the weights' dtype; sums in float32. Waits for the device. Ignores ids of no expert."""
    order = ids.reshape(-1).sort(stable=True).indices
    counts = torch.bincount(ids.reshape(-1).clamp(0, w1.shape[0]), minlength=w1.shape[0] + 1).tolist()[: w1.shape[0]]
    rows, scale = order // ids.shape[1], weights.reshape(-1)[order].float()
    output, start = torch.zeros(x.shape, dtype=torch.float32, device=x.device), 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        own = rows[start : start + count]
        inner = gating(_first_product(x[own].to(w1.dtype), w1[expert], None if b1 is None else b1[expert]))
        result = torch.nn.functional.linear(inner, w2[expert], None if b2 is None else b2[expert])
        output.index_add_(0, own, result.float() * scale[start : start + count, None])
        start += count
    return output.to(x.dtype)


def _first_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[n, 2 I], from a weight [2 I, H], or [2, I, H] with gate and up separate."""
    if weight.dim() == 2:
        return torch.nn.functional.linear(rows, weight, bias)
    both = torch.cat([torch.nn.functional.linear(rows, half) for half in weight], -1)
    return both if bias is None else both + bias


def _run(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, *gating_and_backend: Any
) -> Tensor:
    gating, backend = Gating(*gating_and_backend[:-1]), gating_and_backend[-1]
    if backend == ONE_BY_ONE:
        return experts_one_by_one(x, ids, weights, w1, w2, b1, b2, gating)
    if _backends is None:
        raise RuntimeError(f"the op names the backend {backend!r}, but `use_experts` was not called in this process")
    return _backends(backend)(x, ids, weights, w1, w2, b1, b2, gating)


# x [T, H], ids [T, k] of experts, weights [T, k]; w1 [E, 2 I, H] (I without a gate), or [E, 2, I, H] with gate and up separate, and
# w2 [E, H, I], of any strides; b1 [E, 2 I], b2 [E, H] -> [T, H] of x's dtype. `Gating` is computed between the products. `backend` is
# chosen when the graph is made, so that the graph shows what computes it.
EXPERTS = define_op(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor w1, Tensor w2, Tensor? b1, Tensor? b2, str activation, bool gated, "
    "bool interleaved, float limit, float alpha, float gate_softcap, float up_softcap, bool up_first, str backend) -> Tensor",
    _run,
    like_first,
)
