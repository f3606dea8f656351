"""Launches the routing kernel."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paged_attn.attn_ops.specs.routing import Routing
from paged_attn.backends.compiling.compile_ahead import launch
from paged_attn.backends.experts.triton.route_kernel import route_kernel
from paged_attn.backends.machine import early_start
from paged_attn.backends.unit_stride import unit_last

MOST_EXPERTS = 1024  # most experts that one program can hold


def route(logits: Tensor, bias: Tensor | None, routing: Routing, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Computes the op; None if there are more experts than a program can hold."""
    tokens, experts = logits.shape
    groups = triton.next_power_of_2(routing.groups)
    size = triton.next_power_of_2(experts // routing.groups)
    if groups * size > MOST_EXPERTS or logits.stride(1) != 1:
        return None
    weights = torch.empty((tokens, routing.top_k), dtype=dtype, device=logits.device)
    ids = torch.empty((tokens, routing.top_k), dtype=torch.int64, device=logits.device)
    if tokens:
        launch(
            route_kernel, (tokens,),
            logits, unit_last(bias), weights, ids, logits.stride(0), routing.hidden, routing.eps, routing.scale,
            EXPERTS=experts, TOP_K=routing.top_k, K=triton.next_power_of_2(routing.top_k), GROUPS=routing.groups, G=groups, S=size,
            TOP_GROUPS=routing.top_groups, GROUP_BEST=routing.group_best, SCORE=routing.score, AFTER=routing.after,
            RENORMALISE=routing.renormalise, HAS_BIAS=bias is not None, ROUNDED=routing.rounded,
            num_warps=1 if groups * size <= 512 else 4, **early_start(logits.device),
        )  # fmt: skip
    return weights, ids
