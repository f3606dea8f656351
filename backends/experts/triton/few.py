"""Launches the kernels for a few tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.compiling.compile_ahead import launch
from paged_attn.backends.experts.triton.arguments import constants_of, strides_of
from paged_attn.backends.experts.triton.few_kernel import few_first, few_second
from paged_attn.backends.machine import early_start


@dataclass(frozen=True)
class FewTiling:
    """Rows of a weight per program, columns that it reads at a time, and its warps; for both products."""

    rows: int = 2
    columns: int = 1024
    warps: int = 4
    second_rows: int = 2
    second_columns: int = 1024
    second_warps: int = 4


def tiling_for(tokens: int, width: int) -> FewTiling:
    """H200, us of one token with two rows and one of the first product: Qwen3-30B-A3B 22.7 and 22.3, Kimi-Linear 31.5 and 30.6, GLM-4.5-Air
    69.3 and 67.5, Mixtral 157.9 and 155.4; of two tokens Qwen3-Next 34.6 and 37.4. With one row of the second product, which is 512 long,
    Qwen3-Next 20.2 and 19.0; Kimi-Linear's, which is 1,024 long, 31.5 and 33.7.
    """
    alone = tokens == 1
    return FewTiling(rows=1 if alone else 2, second_rows=1 if alone and width <= 512 else 2)


def few_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    gating: Gating,
    tiling: FewTiling | None = None,
) -> Tensor:
    """Computes the op; ids and weights [T, k] are contiguous."""
    (tokens, hidden), (experts, _, width), top_k = x.shape, w2.shape, ids.shape[1]
    tiling = tiling or tiling_for(tokens, width)
    early = early_start(x.device)
    inner = torch.empty((tokens * top_k, width), dtype=x.dtype, device=x.device)
    output = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    launch(
        few_first, (tokens * top_k, triton.cdiv(width, tiling.rows)),
        x, ids, w1, b1, inner, x.stride(0), *strides_of(w1, width), 0 if b1 is None else b1.stride(0), gating.limit, gating.alpha,
        EXPERTS=experts, TOP_K=top_k, H=hidden, WIDTH=width, HAS_BIAS=b1 is not None, BLOCK_I=tiling.rows,
        BLOCK_H=min(tiling.columns, triton.next_power_of_2(hidden)), num_warps=tiling.warps, **constants_of(gating), **early,
    )  # fmt: skip
    launch(
        few_second, (tokens, triton.cdiv(hidden, tiling.second_rows)),
        inner, ids, weights, w2, b2, output, *w2.stride(), 0 if b2 is None else b2.stride(0),
        EXPERTS=experts, TOP_K=top_k, H=hidden, WIDTH=width, HAS_BIAS=b2 is not None,
        BLOCK_H=tiling.second_rows, BLOCK_I=min(tiling.second_columns, triton.next_power_of_2(width)), num_warps=tiling.second_warps,
        **early,
    )  # fmt: skip
    return output
