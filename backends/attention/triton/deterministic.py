"""How many new tokens a deterministic step may have: its split is fixed, and every part stores partial sums, so memory limits the parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.triton.plan import attentions, widest_value
from paged_attn.backends.attention.triton.tiling import tiling
from paged_attn.backends.attention.triton.work_partition import PartitionKind, num_parts, partial_rows
from paged_attn.backends.machine import Machine

LONGEST = 131_072  # tokens of a request, if the model states no limit
SHARE = 0.03  # of the GPU's memory; KV takes four fifths of what weights and graphs leave
LEAST_TOKENS = 256


def workspace_bytes(specs: Sequence[AttentionSpec], dtype: torch.dtype, tokens: int, context: int, machine: Machine) -> int:
    """The bytes that `Plan.of` allocates for the last `tokens` tokens of one request of `context` tokens."""
    kinds = [PartitionKind.of(spec, "all", tiling("all", spec, dtype, tokens, context, context, machine)) for spec in specs]
    rows = max((partial_rows(kind, num_parts(kind, (context,), (tokens,))) for kind in kinds), default=0)
    return 4 * rows * (widest_value(specs) + 2)


def step_tokens(
    layers: Sequence[AttentionSpec], dtype: torch.dtype, max_positions: int | None, most: int, machine: Machine, memory: int
) -> int:
    """Tokens per step, at most `most`, such that the end of the longest request needs SHARE of `memory` bytes; at least LEAST_TOKENS."""
    specs, context = [each for layer in layers for each in attentions(layer)], max_positions or LONGEST
    while most > LEAST_TOKENS and workspace_bytes(specs, dtype, min(most, context), context, machine) > SHARE * memory:
        most = max(most // 2, LEAST_TOKENS)
    return most
