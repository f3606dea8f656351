"""Kernels of backends that this room calls without depending on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class GpuKernel:
    """The kernel that computes an op on a GPU, or copies to it. Backends pass it to `use`."""

    def __init__(self) -> None:
        self._kernel: Callable[..., Any] | None = None

    def use(self, kernel: Callable[..., Any]) -> None:
        """Call `kernel` with the arguments from now on; it returns None for arguments that it does not serve."""
        self._kernel = kernel

    def __call__(self, tensor: Tensor, *arguments: Any) -> Any:
        """The kernel's result; None for a tensor that is not on a GPU, and for arguments that no kernel serves."""
        return self._kernel(tensor, *arguments) if self._kernel is not None and tensor.is_cuda else None
