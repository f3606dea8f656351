"""`torch.ops.paged_attn.route`: the experts of each token and their weights, from its router's logits.

It reads nothing but its operands, so it stays inside a piece and inside captured graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.gpu_kernel import GpuKernel
from paged_attn.attn_ops.ops.define import define_op
from paged_attn.attn_ops.specs.routing import Routing

ROUTE_KERNEL = GpuKernel()


def _run(logits: Tensor, bias: Tensor | None, dtype: torch.dtype, *fields: Any) -> tuple[Tensor, Tensor]:
    routing = Routing(*fields)
    result: tuple[Tensor, Tensor] | None = ROUTE_KERNEL(logits, bias, routing, dtype)
    if result is not None:
        return result
    weights, ids = routing(logits, bias)
    return weights.to(dtype), ids


def _fake(logits: Tensor, bias: Tensor | None, dtype: torch.dtype, top_k: int, *_: object) -> tuple[Tensor, Tensor]:
    size = (logits.shape[0], top_k)
    return logits.new_empty(size, dtype=dtype), logits.new_empty(size, dtype=torch.int64)


# logits [T, E], bias [E] or none -> weights [T, top_k] of `dtype`, ids [T, top_k] in int64. The other arguments: `Routing`.
ROUTE = define_op(
    "route(Tensor logits, Tensor? bias, ScalarType dtype, int top_k, str score, str after, int groups, int top_groups, int group_best, "
    "float hidden, bool renormalise, float eps, float scale, bool rounded) -> (Tensor, Tensor)",
    _run,
    _fake,
)
