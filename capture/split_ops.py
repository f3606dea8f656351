"""The ops at which a graph is split into pieces, by overload identity: matching by name silently fails to split."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from paged_attn.attn_ops.history_op import HISTORY_ATTENTION
from paged_attn.attn_ops.module_op import MODULE
from paged_attn.attn_ops.op import UNIFIED_ATTENTION
from paged_attn.attn_ops.positions_op import BATCH_POSITIONS
from paged_attn.attn_ops.recurrent_op import RECURRENT_LAYER
from paged_attn.attn_ops.rope_op import ROPE_AND_STORE_KV

_split_ops: set[OpOverload] = {UNIFIED_ATTENTION, HISTORY_ATTENTION, BATCH_POSITIONS, RECURRENT_LAYER, MODULE, ROPE_AND_STORE_KV}


def register_split_op(op: OpOverload) -> None:
    """Make graphs compiled from now on split at every call of `op`, e.g. `torch.ops.mylib.all_to_all.default`.

    Raises:
        TypeError: `op` is a name or a packet of overloads; the message lists its overloads.
    """
    if not isinstance(op, OpOverload):
        hint = f"; pass one of its overloads: {', '.join(op.overloads())}" if isinstance(op, torch._ops.OpOverloadPacket) else ""
        raise TypeError(f"a split point is an OpOverload such as torch.ops.mylib.op.default, got {op!r}{hint}")
    _split_ops.add(op)


def split_ops() -> frozenset[OpOverload]:
    """The registered overloads; attention, recurrent layers and the batch's positions are always among them."""
    return frozenset(_split_ops)
