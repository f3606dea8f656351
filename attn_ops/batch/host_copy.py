"""Copies numbers from the host to a device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def copy_to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """Such a tensor there, for which the host does not wait.

    A GPU reads pinned memory by itself. For more than 64 KB of other memory, a prompt's rows say, CUDA waits until the stream is empty.
    """
    host = torch.from_numpy(numbers)
    return (pinned(host) if device.type == "cuda" else host).to(device, non_blocking=True)


def pinned(host: Tensor) -> Tensor:
    """A copy; of a fake tensor, too, which has no `pin_memory`."""
    return torch.empty_like(host, pin_memory=True).copy_(host)
