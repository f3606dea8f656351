"""ALiBi's slopes as a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.specs.attention import AttentionSpec


def slopes_of(spec: AttentionSpec, device: torch.device) -> Tensor | None:
    """[q_heads] float32, or None without ALiBi. To be kept per layer: making it copies from the host."""
    if spec.alibi_slopes is None:
        return None
    return torch.tensor(spec.alibi_slopes, dtype=torch.float32).to(device, non_blocking=True)
