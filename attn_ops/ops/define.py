"""Defining the ops of the `paged_attn` namespace. All run on CPU and CUDA tensors; most write into their arguments and return nothing.

Defined with Library.define/impl: a custom_op wrapper costs about twice as much per call (pytorch#139494).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode

_library = torch.library.Library("paged_attn", "DEF")
_bodies: dict[OpOverload, Callable[..., Any]] = {}


def _writes_only(*_: Any, **__: Any) -> None:
    """What tracing needs to know: nothing is returned."""


def define_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any] = _writes_only) -> OpOverload:
    """Register `run` under a schema such as "name(Tensor x, Tensor(a!) output) -> ()"; `fake` makes results of the right shape.

    Returns the overload, to be bound once: it is the op's identity for splitting, and looking it up costs time in every call.
    """
    name = schema.split("(")[0]
    _library.define(schema)
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"paged_attn::{name}", fake, lib=_library)
    overload: OpOverload = getattr(torch.ops.paged_attn, name).default
    _bodies[overload] = run
    return overload


def body_of(op: OpOverload) -> Callable[..., Any]:
    """What an op of ours runs on real tensors: called itself, it runs on fake ones, too."""
    return _bodies[op]


class BodiesOnFakes(TorchDispatchMode):
    """Inside, entered after a FakeTensorMode, ops of ours run on fake tensors what they run on real ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _bodies.get(func, func)(*args, **(kwargs or {}))


class GpuKernel:
    """What computes an op of tensors on a GPU, once `use` was told: so this room knows no backend."""

    def __init__(self) -> None:
        self._kernel: Callable[..., Any] | None = None

    def use(self, kernel: Callable[..., Any]) -> None:
        """From now on `kernel` is called with the op's arguments; for what it does not serve it returns None."""
        self._kernel = kernel

    def __call__(self, tensor: Tensor, *arguments: Any) -> Any:
        """Its result; None for a tensor that lies elsewhere, and for what no kernel serves."""
        return self._kernel(tensor, *arguments) if self._kernel is not None and tensor.is_cuda else None


def overloads_of(target: Any) -> tuple[OpOverload, ...]:
    """What a node of this target may call: an overload itself, all overloads of a packet (Dynamo's `torch.ops.mylib.op`), nothing else."""
    if isinstance(target, OpOverloadPacket):
        return tuple(getattr(target, name) for name in target.overloads())
    return (target,) if isinstance(target, OpOverload) else ()
