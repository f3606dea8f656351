"""Arguments that all kernels of a first product take."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paged_attn.attn_ops.specs.experts import Gating


def strides_of(w1: Tensor, width: int) -> tuple[int, int, int, int]:
    """Strides from expert to expert, from gate to up (unless interleaved), from row to row, from column to column.

    `w1`: [E, 2 I, H], or [E, 2, I, H] if gate and up are separate; `width`: I.
    """
    if w1.dim() == 4:
        return w1.stride(0), w1.stride(1), w1.stride(2), w1.stride(3)
    return w1.stride(0), width * w1.stride(1), w1.stride(1), w1.stride(2)


def constants_of(gating: Gating) -> dict[str, Any]:
    """Constants of the operation after the first product; `limit` and `alpha` are arguments."""
    return {
        "GATED": gating.gated, "INTERLEAVED": gating.interleaved, "ACTIVATION": gating.activation, "HAS_LIMIT": gating.limit != 0.0,
        "HAS_ALPHA": gating.alpha != 0.0, "GATE_SOFTCAP": gating.gate_softcap, "UP_SOFTCAP": gating.up_softcap,
        "UP_FIRST": gating.up_first,
    }  # fmt: skip
