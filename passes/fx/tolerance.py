"""When an operation that a pass replaced counts as computed right. Whole models and their rows: `paged_attn.tolerances`."""

from __future__ import annotations

import torch
from torch import Tensor

OPERATION = {torch.float32: 1e-4, torch.float64: 1e-6}  # of the largest number: both sides may compute in the graph's own type
OPERATION_16_BIT = 3e-2


def operation_limit(expected: Tensor, *dtypes: torch.dtype) -> float:
    """How far any element of an operation's result may be off that was computed in these types."""
    return float(expected.nan_to_num().abs().max()) * max(OPERATION.get(dtype, OPERATION_16_BIT) for dtype in dtypes)
