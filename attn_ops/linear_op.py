"""`torch.ops.paged_attn.linear`: a linear layer that takes one row through a kernel of its own, and any other number as torch does.

A product with one row reads every weight once: it takes as long as the memory takes. cuBLAS starts such a product when the one before has
ended; ours has asked for its first weights by then.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.define_op import define_op


def _run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.is_cuda and x.numel() == x.shape[-1]:
        from paged_attn.backends.triton.one_row import fits, one_row_linear

        if fits(x, weight):
            return one_row_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


# x [..., K], weight [N, K], bias [N] or none, of one dtype -> [..., N]. Nothing that runs on the GPU meanwhile may write the weight.
LINEAR = define_op("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", _run, _fake)
