"""Makes tensors contiguous in their last dimension, for kernels that require it."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Given = TypeVar("Given", Tensor, Tensor | None)


def unit_last(tensor: Given) -> Given:
    """The tensor with stride 1 in its last dimension: itself, or a copy if it is a view such as a column; None stays None."""
    return tensor if tensor is None or is_unit_last(tensor) else tensor.contiguous()


def is_unit_last(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 1
