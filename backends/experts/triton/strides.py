"""How kernels step through the first weight of experts."""

from __future__ import annotations

from torch import Tensor


def strides_of(w1: Tensor, width: int) -> tuple[int, int, int, int]:
    """From expert to expert, from gate to up (where they do not take turns), from row to row, from column to column.

    `w1`: [E, 2 I, H], or [E, 2, I, H] where gate and up lie apart; `width`: I.
    """
    if w1.dim() == 4:
        return w1.stride(0), w1.stride(1), w1.stride(2), w1.stride(3)
    return w1.stride(0), width * w1.stride(1), w1.stride(1), w1.stride(2)
