"""`torch.ops.paged_attn.linear`: torch.nn.functional.linear, with a kernel of its own for few rows where a backend has registered one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.define_op import define_op

FEW_ROWS = 16
FewRowLinear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_few_row_linear: FewRowLinear | None = None


def set_few_row_linear(run: FewRowLinear | None) -> None:
    """Make `run` compute x [T, K] or [1, T, K] with 1 <= T <= 16, on CUDA and of a 16-bit dtype, times a contiguous weight; None: F.linear."""
    global _few_row_linear
    _few_row_linear = run


def _run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] or [1, T, K], weight [N, K], bias [N]; returns [T, N] or [1, T, N]."""
    if _few_row_linear is not None and x.is_cuda and _is_small(x, weight, bias):
        return _few_row_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def _is_small(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        x.dim() in (2, 3)
        and 1 <= x.shape[-2] <= FEW_ROWS
        and (x.dim() == 2 or x.shape[0] == 1)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.dtype == weight.dtype
        and (bias is None or bias.dtype == x.dtype)
        and weight.is_contiguous()
    )


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    torch._check(x.shape[-1] == weight.shape[1], lambda: f"linear of {list(x.shape)} with a weight {list(weight.shape)}")
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


LINEAR = define_op("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", _run, _fake)
