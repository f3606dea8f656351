"""Which overloads of an op a graph may mean."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload, OpOverloadPacket


def overloads_of(target: Any) -> tuple[OpOverload, ...]:
    """What a node of this target may call: an overload itself, all overloads of a packet (Dynamo's `torch.ops.mylib.op`), nothing else."""
    if isinstance(target, OpOverloadPacket):
        return tuple(getattr(target, name) for name in target.overloads())
    return (target,) if isinstance(target, OpOverload) else ()
