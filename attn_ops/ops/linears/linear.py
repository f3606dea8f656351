"""`torch.ops.paged_attn.linear`: a linear layer that computes a single row with our own kernel, and any other number of rows as torch does.
`linear_float32`: a linear layer on 16-bit tensors with a float32 result, as routers compute their logits.

A product with one row reads every weight once, so memory bandwidth limits it. cuBLAS starts such a product when the previous kernel has
ended; our kernel can request its first weights before that.

A product of two 16-bit numbers is exact in float32, and so are both casts. So tensor cores, which add up in float32, give the sums of the
model's own product of casts, in another order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.gpu_kernel import GpuKernel
from paged_attn.attn_ops.ops.define import define_op

ONE_ROW_KERNEL = GpuKernel()


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """x [..., K] of one row on a GPU times weight [N, K] -> [..., N] of `dtype`; None if no kernel serves it."""
    result: Tensor | None = ONE_ROW_KERNEL(x, weight, bias, dtype) if x.numel() == x.shape[-1] else None
    return result


def _run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result = one_row(x, weight, bias, x.dtype)
    return F.linear(x, weight, bias) if result is None else result


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


# x [..., K], weight [N, K], bias [N] or none, of one dtype -> [..., N]. Nothing that runs on the GPU at the same time may write the weight.
LINEAR = define_op("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", _run, _fake)


def _run_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not x.is_cuda or torch.version.hip is not None or _adds_up_in_16_bits(x.dtype):
        return F.linear(x.float(), weight.float(), bias)
    result = one_row(x, weight, bias, torch.float32)
    if result is None:
        flat = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)
        result = flat.view(*x.shape[:-1], weight.shape[0])
        if bias is not None:
            result.add_(bias)
    return result


def _adds_up_in_16_bits(dtype: torch.dtype) -> bool:
    """Whether the user allowed reduced-precision sums; the model's own product, of casts to float32, does not use them."""
    return dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation


def _fake_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32)


# x [..., K] and weight [N, K], both bfloat16 or both float16; bias [N] float32 or none -> [..., N] float32. Nothing that runs on the GPU
# at the same time may write the weight.
LINEAR_FLOAT32 = define_op("linear_float32(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", _run_float32, _fake_float32)
