"""Launches the kernels for many tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.compile_ahead import launch
from paged_attn.backends.experts.triton.arguments import constants_of, strides_of
from paged_attn.backends.experts.triton.grouped_kernel import grouped_first, grouped_second, sum_parts
from paged_attn.backends.experts.triton.hopper import BLOCK, hopper_products
from paged_attn.backends.experts.triton.sort_kernel import count_pairs, sort_few_pairs, sort_pairs
from paged_attn.backends.machine import early_start

SORTED_AT_ONCE = 128  # pairs of a program
ONE_PROGRAM = 1024  # pairs: so many are sorted by one launch of one


@dataclass(frozen=True)
class GroupedTiling:
    """Rows, columns and depth of a block of both products, warps and stages of its loads."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3


def tiling_for(pairs_of_an_expert: float) -> GroupedTiling:
    """By how many pairs an expert gets on average: `benchmarks/experts.py --tune` on an H200, where the best of 31 tilings of each of three
    shapes is at most 4 % faster than these."""
    if pairs_of_an_expert <= 12:
        return GroupedTiling(16, 128, 128)
    if pairs_of_an_expert <= 24:
        return GroupedTiling(32, 128, 64, stages=4)
    return GroupedTiling(64, 256, 64, warps=8) if pairs_of_an_expert <= 160 else GroupedTiling(128, 128, 64, warps=8, stages=4)


def token_counts(experts: int, top_k: int) -> Iterator[int]:
    """Numbers of tokens that together need every kernel that any number needs."""
    tokens, largest = 1, tiling_for(math.inf)
    while True:
        yield tokens
        if tokens * top_k > ONE_PROGRAM and tiling_for(tokens * top_k / experts) == largest:
            return
        tokens += max(1, tokens // 4)


def grouped_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    gating: Gating,
    tiling: GroupedTiling | None = None,
) -> Tensor:
    """As the op; ids and weights [T, k] are contiguous. Nothing waits for the GPU: as many blocks are launched as there may be."""
    (tokens, hidden), (experts, _, width), top_k = x.shape, w2.shape, ids.shape[1]
    num_pairs = tokens * top_k
    products = hopper_products(x, w1, w2, b1, b2, gating, num_pairs / experts) if tiling is None else None
    tiling = tiling or tiling_for(num_pairs / experts)
    pairs, blocks, _ = sorted_pairs(ids, experts, BLOCK if products else tiling.m)
    early = early_start(x.device, num_pairs <= ONE_PROGRAM)
    inner = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_pairs, hidden), dtype=x.dtype, device=x.device)
    output = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if products:
        products[0](x, top_k, pairs, blocks, weights, inner)
        products[1](inner, 1, pairs, blocks, weights, parts)
    else:
        _general_products(x, weights, w1, w2, b1, b2, gating, tiling, top_k, pairs, blocks, inner, parts, early)
    launch(
        sum_parts, (tokens, triton.cdiv(hidden, 1024)), parts, ids, output,
        EXPERTS=experts, TOP_K=top_k, H=hidden, BLOCK=1024, **early,
    )  # fmt: skip
    return output


def _general_products(
    x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating, tiling: GroupedTiling,
    top_k: int, pairs: Tensor, blocks: Tensor, inner: Tensor, parts: Tensor, early: dict[str, bool],
) -> None:  # fmt: skip
    (experts, hidden, width), num_blocks = w2.shape, blocks.shape[1]
    how = {
        "EXPERTS": experts, "H": hidden, "WIDTH": width, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "BLOCK_M": tiling.m, "BLOCK_N": tiling.n, "BLOCK_K": tiling.k, "num_warps": tiling.warps, "num_stages": tiling.stages,
    }  # fmt: skip
    launch(
        grouped_first, (num_blocks * triton.cdiv(width, tiling.n),),
        x, pairs, blocks, w1, b1, inner, num_blocks, x.stride(0), *strides_of(w1, width), 0 if b1 is None else b1.stride(0),
        gating.limit, gating.alpha, TOP_K=top_k, HAS_BIAS=b1 is not None, **constants_of(gating), **how, **early,
    )  # fmt: skip
    launch(
        grouped_second, (num_blocks * triton.cdiv(hidden, tiling.n),),
        inner, pairs, blocks, weights, w2, b2, parts, num_blocks, *w2.stride(), 0 if b2 is None else b2.stride(0),
        HAS_BIAS=b2 is not None, EARLY=early["EARLY"], **how,  # not launched early: beside the first it would crowd some multiprocessors
    )  # fmt: skip


def sorted_pairs(ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """(pairs [T k] by expert, blocks [3, most there may be] of `block` pairs each, counts [E or more]): see `sort_pairs`; int32."""
    num_pairs, padded = ids.numel(), triton.next_power_of_2(experts)
    num_blocks = num_pairs // block + min(experts, num_pairs)
    blocks = torch.empty((3, num_blocks), dtype=torch.int32, device=ids.device)
    how = {"EXPERTS": experts, "E": padded, "BLOCK_M": block, "BLOCK": SORTED_AT_ONCE}
    if num_pairs <= ONE_PROGRAM:
        counts, pairs = (torch.empty(size, dtype=torch.int32, device=ids.device) for size in (2 * padded, num_pairs))
        launch(sort_few_pairs, (1,), ids, counts, pairs, blocks, num_pairs, num_blocks, **how, **early_start(ids.device))
        return pairs, blocks, counts
    counts = torch.zeros(padded, dtype=torch.int32, device=ids.device)
    # Not as halves of one tensor: the second would lie at any multiple of 4 bytes, for which Triton compiles the kernels anew.
    ranks, pairs = (torch.empty(num_pairs, dtype=torch.int32, device=ids.device) for _ in range(2))
    launch(count_pairs, (triton.cdiv(num_pairs, SORTED_AT_ONCE),), ids, counts, ranks, num_pairs, EXPERTS=experts, BLOCK=SORTED_AT_ONCE)
    launch(sort_pairs, (triton.cdiv(num_pairs, SORTED_AT_ONCE),), ids, counts, ranks, pairs, blocks, num_pairs, num_blocks, **how)
    return pairs, blocks, counts
