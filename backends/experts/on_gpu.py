"""Which kernels compute a layer of experts on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.experts.triton.few import few_experts
from paged_attn.backends.experts.triton.grouped import grouped_experts

FEW_TOKENS = 8  # beyond them tokens share experts, and a product reads each once
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def experts_on_gpu(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating
) -> Tensor | None:
    """As the op; None where no kernel of ours fits."""
    if x.dtype not in DTYPES or w1.dtype != x.dtype or w2.dtype != x.dtype:
        return None
    if x.stride(1) != 1:
        x = x.contiguous()
    experts = few_experts if len(x) <= FEW_TOKENS and w1.stride(2) == 1 and w2.stride(2) == 1 else grouped_experts
    return experts(x, ids.contiguous(), weights.contiguous(), w1, w2, b1, b2, gating)
