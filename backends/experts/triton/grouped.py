"""Launches the kernels for many tokens."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.experts.triton.few import gate_rows
from paged_attn.backends.experts.triton.grouped_kernel import grouped_first, grouped_second, sum_parts
from paged_attn.backends.experts.triton.sort_kernel import count_pairs, sort_pairs

SORTED_AT_ONCE = 128  # pairs of a program


def grouped_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating
) -> Tensor:
    """As the op; ids and weights [T, k] are contiguous. Nothing waits for the GPU: as many blocks are launched as there may be."""
    (tokens, hidden), (experts, _, width), top_k = x.shape, w2.shape, ids.shape[1]
    num_pairs, padded = tokens * top_k, triton.next_power_of_2(experts)
    counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
    ranks, pairs = torch.empty((2, num_pairs), dtype=torch.int32, device=x.device)
    programs = (triton.cdiv(num_pairs, SORTED_AT_ONCE),)
    count_pairs[programs](ids, counts, ranks, num_pairs, EXPERTS=experts, BLOCK=SORTED_AT_ONCE)
    sort_pairs[programs](ids, counts, ranks, pairs, num_pairs, EXPERTS=experts, E=padded, BLOCK=SORTED_AT_ONCE)

    block_m, block_n, block_k = blocks(num_pairs / experts)
    most_blocks = num_pairs // block_m + min(experts, num_pairs)
    inner = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_pairs, hidden), dtype=x.dtype, device=x.device)
    output = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    step, up = gate_rows(gating, width)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    grouped_first[(most_blocks * triton.cdiv(width, block_n),)](
        x, pairs, counts, w1, b1, inner, x.stride(0), *w1.stride(), 0 if b1 is None else b1.stride(0), gating.limit, gating.alpha,
        EXPERTS=experts, E=padded, TOP_K=top_k, H=hidden, WIDTH=width, STEP=step, UP=up, GATED=gating.gated, HAS_BIAS=b1 is not None,
        ACTIVATION=gating.activation, HAS_LIMIT=gating.limit != 0.0, HAS_ALPHA=gating.alpha != 0.0, PRECISION=precision,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    grouped_second[(most_blocks * triton.cdiv(hidden, block_n),)](
        inner, pairs, counts, weights, w2, b2, parts, *w2.stride(), 0 if b2 is None else b2.stride(0),
        EXPERTS=experts, E=padded, H=hidden, WIDTH=width, HAS_BIAS=b2 is not None, PRECISION=precision,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    sum_parts[(tokens, triton.cdiv(hidden, 1024))](parts, ids, output, EXPERTS=experts, TOP_K=top_k, H=hidden, BLOCK=1024)
    return output


def blocks(pairs_of_an_expert: float) -> tuple[int, int, int]:
    """Rows, columns and depth of a block, by how many pairs an expert gets on average. Not measured yet."""
    if pairs_of_an_expert <= 16:
        return 16, 64, 128
    return (32, 64, 64) if pairs_of_an_expert <= 48 else (64, 128, 64) if pairs_of_an_expert <= 128 else (128, 128, 64)
