"""`torch.ops.paged_attn.linear`: a linear layer that takes one row through a kernel of its own, and any other number as torch does.

A product with one row reads every weight once: it takes as long as the memory takes. cuBLAS starts such a product when the one before has
ended; a kernel of our own may ask for its first weights by then.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.ops.define import GpuKernel, define_op

ONE_ROW_KERNEL = GpuKernel()


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """x [..., K] of one row on a GPU times weight [N, K] -> [..., N] of `dtype`; None for what no kernel serves."""
    result: Tensor | None = ONE_ROW_KERNEL(x, weight, bias, dtype) if x.numel() == x.shape[-1] else None
    return result


def _run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result = one_row(x, weight, bias, x.dtype)
    return F.linear(x, weight, bias) if result is None else result


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


# x [..., K], weight [N, K], bias [N] or none, of one dtype -> [..., N]. Nothing that runs on the GPU meanwhile may write the weight.
LINEAR = define_op("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", _run, _fake)
