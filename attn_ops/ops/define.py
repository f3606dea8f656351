"""Defines the ops of the `paged_attn` namespace. All run on CPU and CUDA tensors; most write into their arguments and return nothing.

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
    """The fake of an op that returns nothing."""


def like_first(tensor: Tensor, *_: Any) -> Tensor:
    """The fake of an op whose result has the shape and dtype of its first argument."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def define_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any] = _writes_only) -> OpOverload:
    """Register `run` under a schema such as "name(Tensor x, Tensor(a!) output) -> ()"; `fake` makes results of the right shape.

    Returns the overload, which identifies the op when graphs are split. Keep it: looking it up takes time in every call.
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
    """What our op runs on real tensors; called directly, it also runs on fake ones."""
    return _bodies[op]


class BodiesOnFakes(TorchDispatchMode):
    """Inside, if entered after a FakeTensorMode, our ops run their real bodies on fake tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _bodies.get(func, func)(*args, **(kwargs or {}))


def overloads_of(target: Any) -> tuple[OpOverload, ...]:
    """What a node with this target may call: an overload itself, all overloads of a packet (Dynamo's `torch.ops.mylib.op`), or nothing."""
    if isinstance(target, OpOverloadPacket):
        return tuple(getattr(target, name) for name in target.overloads())
    return (target,) if isinstance(target, OpOverload) else ()
