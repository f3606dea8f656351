"""`torch.ops.paged_attn.add_norm_linear`: a residual addition, an RMS norm and the linear layer behind them, which one kernel computes for
a single row; and `add_norm`, the first two alone.

RMS norm: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. The sum is rounded to its dtype, as the model's own addition is;
everything behind it is computed in float32 (or float64) and rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.gpu_kernel import GpuKernel
from paged_attn.attn_ops.ops.define import define_op
from paged_attn.attn_ops.ops.linears.linear import one_row

ADD_NORM_KERNEL = GpuKernel()
ADD_NORM_LINEAR_KERNEL = GpuKernel()


def rms_norm(x: Tensor, scale: Tensor, eps: float, offset: float) -> Tensor:
    """x [..., H], scale [H] -> x / sqrt(mean(x^2) + eps) * (offset + scale), of x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (scale.to(wide.dtype) + offset)
    return normed.to(x.dtype)


def _run_norm(x: Tensor, residual: Tensor, scale: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] | None = ADD_NORM_KERNEL(x, residual, scale, eps, offset)
    if result is None:
        total = x + residual
        result = rms_norm(total, scale, eps, offset), total
    return result


def _fake_norm(x: Tensor, residual: Tensor, scale: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


# x and residual [..., H], scale [H], of one dtype -> (rms_norm(x + residual), x + residual) [..., H].
ADD_NORM = define_op(
    "add_norm(Tensor x, Tensor residual, Tensor scale, float eps, float offset) -> (Tensor, Tensor)", _run_norm, _fake_norm
)


def _run(
    x: Tensor, residual: Tensor, scale: Tensor, eps: float, offset: float, weight: Tensor, bias: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == x.shape[-1]:
        result: tuple[Tensor, Tensor, Tensor] | None = ADD_NORM_LINEAR_KERNEL(x, residual, scale, eps, offset, weight, bias, keep)
        if result is not None:
            return result
    normed, total = _run_norm(x, residual, scale, eps, offset)
    product = one_row(normed, weight, bias, normed.dtype)
    return F.linear(normed, weight, bias) if product is None else product, normed if keep else x.new_empty(0), total


def _fake(
    x: Tensor, residual: Tensor, scale: Tensor, eps: float, offset: float, weight: Tensor, bias: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], weight.shape[0])), x.new_empty(x.shape if keep else 0), x.new_empty(x.shape)


# x and residual [..., K], scale [K], weight [N, K], bias [N] or none, of one dtype -> (linear(n) [..., N],
# n [..., K] = rms_norm(x + residual) if `keep`, else [0], x + residual [..., K]).
# Nothing that runs on the GPU at the same time may write scale or weight.
ADD_NORM_LINEAR = define_op(
    "add_norm_linear(Tensor x, Tensor residual, Tensor scale, float eps, float offset, Tensor weight, Tensor? bias, bool keep)"
    " -> (Tensor, Tensor, Tensor)",
    _run, _fake,
)  # fmt: skip
