"""Which parameters may become slices of one tensor, and which already are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 16  # bytes; kernels and Inductor assume that weights, and slices of outputs, are aligned


class Memory:
    """How many of a model's tensors hold each storage.

    Args:
        tensors: all known tensors of the model; values that are not plain tensors are ignored.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        distinct = {id(t): t for t in tensors if type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided}
        self._holders = Counter(t.untyped_storage().data_ptr() for t in distinct.values())

    def is_own(self, tensor: Tensor) -> bool:
        """Whether a tensor can be moved unnoticed: its storage holds only this tensor and is not shared with another process."""
        storage = tensor.untyped_storage()
        shared = tensor.device.type == "cpu" and tensor.is_shared()
        return self._holders[storage.data_ptr()] <= 1 and storage.nbytes() == tensor.nbytes and not shared


def is_ordinary_parameter(value: Any) -> bool:
    """Whether a value is a plain, dense leaf parameter that can be sliced along dim 0 with aligned slices, or be one (3 dims)."""
    return (
        type(value) is nn.Parameter
        and value.is_leaf
        and value.layout == torch.strided
        and value.device.type != "meta"
        and value.dim() >= 1
        and value.numel() > 0
        and value.is_contiguous()
        and not value.is_inference()
        and (value.numel() if value.dim() == 3 else value.shape[0]) * value.itemsize % ALIGNMENT == 0
    )


def lie_in_a_row(tensors: Sequence[Tensor]) -> bool:
    """Whether contiguous tensors are neighbours in one storage, in this order: another engine merged them before."""
    if len({(t.untyped_storage().data_ptr(), t.dtype, t.shape[1:]) for t in tensors}) != 1:
        return False
    return all(a.storage_offset() + a.numel() == b.storage_offset() for a, b in pairwise(tensors))
