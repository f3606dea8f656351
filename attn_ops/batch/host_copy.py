"""Copies numbers from the host to a device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def copy_to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of these numbers on the device; the host does not wait for the copy.

    A GPU reads pinned memory by itself. For unpinned memory, CUDA waits until the stream is empty if it copies more than 64 KB (such as a
    prompt's rows).
    """
    host = torch.from_numpy(numbers)
    return (pinned(host) if device.type == "cuda" else host).to(device, non_blocking=True)


def pinned(host: Tensor) -> Tensor:
    """A pinned copy; unlike `pin_memory`, this also works for fake tensors."""
    return torch.empty_like(host, pin_memory=True).copy_(host)
