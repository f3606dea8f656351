"""All-reduce, broadcast and all-gather, as ops that Dynamo traces, Inductor knows, and CUDA graphs record."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor

if torch.distributed.is_available():
    import torch.distributed._functional_collectives  # says what the ops below do on meta tensors

_ops: Any = torch.ops._c10d_functional


def all_reduce(partial: Tensor, group: str) -> Tensor:
    """The sum of all ranks' tensors of one shape; every rank gets it."""
    summed: Tensor = _ops.wait_tensor(_ops.all_reduce(partial.contiguous(), "sum", group))
    return summed


def broadcast_from_first(tensor: Tensor, group: str) -> Tensor:
    """The first rank's tensor, on every rank."""
    received: Tensor = _ops.wait_tensor(_ops.broadcast(tensor.contiguous(), 0, group))
    return received


def all_gather_last_dim(part: Tensor, width: int, ranks: int, group: str) -> Tensor:
    """[..., width] from each rank's slice of the last dim, of which the last ones may be shorter (as torch.chunk cuts)."""
    each = -(-width // ranks)
    rows = part.reshape(-1, part.shape[-1])
    if width % ranks:
        rows = torch.nn.functional.pad(rows, (0, each - part.shape[-1]))
    stacked: Tensor = _ops.wait_tensor(_ops.all_gather_into_tensor(rows.contiguous(), ranks, group))
    joined = stacked.view(ranks, -1, each).transpose(0, 1).reshape(-1, ranks * each)
    return joined[:, :width].reshape(*part.shape[:-1], width)
