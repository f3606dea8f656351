"""The ops at which a graph is split, identified by overload or by tag: matching by name could silently fail to split."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from paged_attn.attn_ops.ops.define import overloads_of
from paged_attn.attn_ops.ops.kinds import SPLITTING

_split_ops: set[OpOverload] = set(SPLITTING)


def register_split_op(op: OpOverload) -> None:
    """Make graphs compiled from now on split at every call of `op`, e.g. `torch.ops.mylib.all_to_all.default`.

    An op with `torch.Tag.cudagraph_unsafe` is a split point without being registered.

    Raises:
        TypeError: `op` is a name or a packet of overloads; the message lists its overloads.
    """
    if not isinstance(op, OpOverload):
        hint = f"; pass one of its overloads: {', '.join(op.overloads())}" if isinstance(op, OpOverloadPacket) else ""
        raise TypeError(f"a split point is an OpOverload such as torch.ops.mylib.op.default, got {op!r}{hint}")
    _split_ops.add(op)


def split_ops() -> frozenset[OpOverload]:
    """The registered overloads, always including attention, recurrent layers and the batch's positions. For tags see `is_split_op`."""
    return frozenset(_split_ops)


def is_split_op(target: Any, ops: Set[OpOverload]) -> bool:
    """Whether a `call_function` node with this target runs between pieces: it is one of `ops`, or tagged `cudagraph_unsafe` by its author.

    Dynamo's graphs call `torch.ops.mylib.op` as a packet, which does not say which overload; it counts if any of its overloads does.
    """
    return any(op in ops or torch.Tag.cudagraph_unsafe in op.tags for op in overloads_of(target))
