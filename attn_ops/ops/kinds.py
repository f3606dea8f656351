"""The kinds of operations that are replaced by our ops; a new kind is an op and a line here."""

from __future__ import annotations

from dataclasses import dataclass

from torch._ops import OpOverload

from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.ops.dual_chunk import DUAL_CHUNK_ATTENTION
from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.ops.latent import LATENT_ATTENTION
from paged_attn.attn_ops.ops.linears.add_norm import ADD_NORM, ADD_NORM_LINEAR
from paged_attn.attn_ops.ops.linears.linear import LINEAR, LINEAR_FLOAT32
from paged_attn.attn_ops.ops.linears.lora import LORA, LORA_UP
from paged_attn.attn_ops.ops.module import MODULE
from paged_attn.attn_ops.ops.positions import BATCH_POSITIONS, REQUEST_LENGTHS
from paged_attn.attn_ops.ops.recompute import RECOMPUTE_ATTENTION
from paged_attn.attn_ops.ops.recurrent import RECURRENT_LAYER
from paged_attn.attn_ops.ops.routing import ROUTE
from paged_attn.attn_ops.ops.scans import (
    CHANNEL_SCAN,
    GATED_DELTA_NET,
    GATED_DELTA_RULE,
    KDA,
    LINEAR_ATTENTION,
    MAMBA1_SCAN,
    MAMBA2_SCAN,
    SHORT_CONV,
)


@dataclass(frozen=True)
class OpKind:
    """What may be done with a graph that calls an op.

    Attributes:
        splits: the op runs between pieces, because it reads the forward context or cannot be captured.
        in_full_graphs: it neither waits for the GPU nor has a data-dependent shape, so it may be captured with a whole decode step.
        on_disk: its arguments mean the same in every process, so the graph cache may store its graph. Indices of Python objects do not,
            except those of recurrent layers, which are found in each process and are part of the stored graph's key.
    """

    op: OpOverload
    splits: bool
    in_full_graphs: bool
    on_disk: bool


KINDS = (
    OpKind(UNIFIED_ATTENTION, splits=True, in_full_graphs=True, on_disk=True),
    OpKind(LATENT_ATTENTION, splits=True, in_full_graphs=True, on_disk=True),
    OpKind(DUAL_CHUNK_ATTENTION, splits=True, in_full_graphs=True, on_disk=True),
    OpKind(RECOMPUTE_ATTENTION, splits=True, in_full_graphs=False, on_disk=False),
    OpKind(RECURRENT_LAYER, splits=True, in_full_graphs=True, on_disk=True),  # no full graphs if a layer is not `in_graphs`
    OpKind(SHORT_CONV, splits=True, in_full_graphs=True, on_disk=True),
    OpKind(GATED_DELTA_RULE, splits=True, in_full_graphs=True, on_disk=True),
    OpKind(GATED_DELTA_NET, splits=True, in_full_graphs=True, on_disk=True),
    OpKind(KDA, splits=True, in_full_graphs=True, on_disk=True),
    OpKind(LINEAR_ATTENTION, splits=True, in_full_graphs=True, on_disk=True),
    OpKind(MAMBA2_SCAN, splits=True, in_full_graphs=True, on_disk=True),
    OpKind(MAMBA1_SCAN, splits=True, in_full_graphs=True, on_disk=True),
    OpKind(CHANNEL_SCAN, splits=True, in_full_graphs=True, on_disk=True),
    OpKind(MODULE, splits=True, in_full_graphs=False, on_disk=False),
    OpKind(BATCH_POSITIONS, splits=True, in_full_graphs=True, on_disk=True),
    OpKind(REQUEST_LENGTHS, splits=True, in_full_graphs=True, on_disk=True),
    OpKind(EXPERTS, splits=False, in_full_graphs=True, on_disk=True),
    OpKind(ROUTE, splits=False, in_full_graphs=True, on_disk=True),
    OpKind(LINEAR, splits=False, in_full_graphs=True, on_disk=True),
    OpKind(LINEAR_FLOAT32, splits=False, in_full_graphs=True, on_disk=True),
    OpKind(ADD_NORM_LINEAR, splits=False, in_full_graphs=True, on_disk=True),
    OpKind(ADD_NORM, splits=False, in_full_graphs=True, on_disk=True),
    OpKind(LORA, splits=False, in_full_graphs=True, on_disk=True),
    OpKind(LORA_UP, splits=False, in_full_graphs=True, on_disk=True),
)
SPLITTING = frozenset(kind.op for kind in KINDS if kind.splits)
# Ops of layers with recurrent state: a graph with only these can be served without attention.
SCANS = (SHORT_CONV, GATED_DELTA_RULE, GATED_DELTA_NET, KDA, LINEAR_ATTENTION, MAMBA2_SCAN, MAMBA1_SCAN, CHANNEL_SCAN)
WITH_STATE = (RECURRENT_LAYER, *SCANS)
