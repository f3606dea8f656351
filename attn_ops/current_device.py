"""The thread's current CUDA device. Triton launches kernels there, and events without a stream are recorded there, whatever device the
tensors are on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

_NOTHING = nullcontext()


class _OnDevice(Protocol):
    @property
    def device(self) -> torch.device: ...


_Self = TypeVar("_Self", bound=_OnDevice)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes this device the current one; does nothing if it is not a CUDA device, or CUDA has not been used yet."""
    return torch.cuda.device(device) if device.type == "cuda" and torch.cuda.is_initialized() else _NOTHING


def on_its_device(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """The method, run with `self.device` as the current device, because an engine is also called from threads that did not set it."""

    @functools.wraps(method)
    def called(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with current_device(self.device):
            return method(self, *args, **kwargs)

    return called
