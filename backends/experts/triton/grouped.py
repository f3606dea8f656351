"""Launches the kernels for many tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.compiling.compile_ahead import launch
from paged_attn.backends.experts.triton.arguments import constants_of, strides_of
from paged_attn.backends.experts.triton.grouped_kernel import grouped_first, grouped_second, sum_parts
from paged_attn.backends.experts.triton.hopper import BLOCK, hopper_products
from paged_attn.backends.experts.triton.sort_kernel import count_pairs, sort_few_pairs, sort_pairs
from paged_attn.backends.machine import Machine, early_start, machine_of

SORTED_AT_ONCE = 128  # pairs per program
ONE_PROGRAM = 1024  # up to this many pairs, a single program sorts them in one launch


@dataclass(frozen=True)
class GroupedTiling:
    """Rows, columns and depth of a block in both products, warps, and stages of its loads."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3

    @property
    def constants(self) -> dict[str, int]:
        """What the kernels and their launch take."""
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k, "num_warps": self.warps, "num_stages": self.stages}


def tiling_for(pairs_of_an_expert: float, w1: Tensor, gated: bool) -> GroupedTiling:
    """The tiling for an average number of pairs per expert, on the weights' GPU.

    In 16 bits from `benchmarks/experts.py --tune` on an H200, where the best of 31 tilings for each of three shapes is at most 4 %
    faster than these; in float32 tilings that spill at most a few registers.
    """
    machine = machine_of(w1.device)
    if w1.itemsize > 2:
        small, medium, large = GroupedTiling(16, 64, 64), GroupedTiling(32, 64, 32), GroupedTiling(64, 64, 32, warps=8)
    else:
        small, medium, large = GroupedTiling(16, 128, 128), GroupedTiling(32, 128, 64, stages=4), GroupedTiling(64, 256, 64, warps=8)
        if pairs_of_an_expert > 160 and machine.sm90_or_newer:  # before Hopper a thread would spill 3,840 bytes
            large = GroupedTiling(128, 128, 64, warps=8, stages=4)
    found = small if pairs_of_an_expert <= 12 else medium if pairs_of_an_expert <= 24 else large
    return _fitting(found, w1.itemsize, gated, machine)


def tilings_for_one(w1: Tensor, w2: Tensor, top_k: int, gated: bool) -> tuple[GroupedTiling, GroupedTiling]:
    """The tilings of both products of a single token: `tiling_for` in float32, otherwise half as deep with more loads in flight, or
    narrower blocks where those would leave half of the GPU idle.

    H200, us of both products of gpt-oss (4 experts, 2,880 columns): 56.5; only the first half as deep 53.8, only the second 54.9. Of
    Llama 4 Scout's (one expert, 8,192 and 5,120 columns) with narrower blocks: 44.1 -> 42.1 and 42.8 -> 32.3.
    """
    wide, machine = tiling_for(top_k / len(w1), w1, gated), machine_of(w1.device)
    if w1.itemsize > 2:
        return wide, wide

    def chosen(columns: int, gated: bool) -> GroupedTiling:
        if 2 * top_k * triton.cdiv(columns, wide.n) < machine.multiprocessors:
            found = replace(wide, n=wide.n // 2, stages=5)
        else:
            found = replace(wide, k=wide.k // 2, warps=8, stages=4) if gated else replace(wide, k=wide.k // 2, stages=5)
        return _fitting(found, w1.itemsize, gated, machine)

    return chosen(w2.shape[2], gated), chosen(w2.shape[1], False)


def _fitting(tiling: GroupedTiling, itemsize: int, gated: bool, machine: Machine) -> GroupedTiling:
    """Reduces the number or depth of buffers until those that the first product has in flight fit on the GPU.

    There is one less than stages, except for Hopper's products, which read one buffer while all others are filled.
    """
    of_hopper = machine.sm90_or_newer and tiling.m >= 64 and itemsize == 2
    needed = (tiling.stages - (not of_hopper)) * (tiling.m + tiling.n * (1 + gated)) * tiling.k * itemsize
    if not machine.shared_bytes or needed <= machine.shared_bytes:
        return tiling
    if tiling.stages > 3:
        smaller = replace(tiling, stages=tiling.stages - 1)
    elif tiling.k > 32:
        smaller = replace(tiling, k=tiling.k // 2)
    else:
        smaller = replace(tiling, n=tiling.n // 2)
    return _fitting(smaller, itemsize, gated, machine)


def token_counts(w1: Tensor, top_k: int, gated: bool) -> Iterator[int]:
    """Numbers of tokens that together use every kernel that any number of tokens uses, with these weights of all experts."""
    tokens, largest = 1, tiling_for(math.inf, w1, gated)
    while True:
        yield tokens
        if tokens * top_k > ONE_PROGRAM and tiling_for(tokens * top_k / len(w1), w1, gated) == largest:
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
    """Computes the op; ids and weights [T, k] are contiguous. Launches as many blocks as there may be, so nothing waits for the GPU."""
    (tokens, hidden), (experts, _, width), top_k = x.shape, w2.shape, ids.shape[1]
    num_pairs = tokens * top_k
    products = hopper_products(x, w1, w2, b1, b2, gating, num_pairs / experts) if tiling is None else None
    early = early_start(x.device, num_pairs <= ONE_PROGRAM)
    inner = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_pairs, hidden), dtype=x.dtype, device=x.device)
    output = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if tokens == 1 and not products:
        tilings = (tiling, tiling) if tiling else tilings_for_one(w1, w2, top_k, gating.gated)
        _general_products(x, weights, w1, w2, b1, b2, gating, tilings, top_k, None, ids, inner, parts, early, output)
        return output
    tiling = tiling or tiling_for(num_pairs / experts, w1, gating.gated)
    pairs, blocks, _ = sorted_pairs(ids, experts, BLOCK if products else tiling.m)
    if products:
        products[0](x, top_k, pairs, blocks, weights, inner)
        products[1](inner, 1, pairs, blocks, weights, parts)
    else:
        _general_products(x, weights, w1, w2, b1, b2, gating, (tiling, tiling), top_k, pairs, blocks, inner, parts, early)
    launch(
        sum_parts, (tokens, triton.cdiv(hidden, 1024)), parts, ids, output,
        EXPERTS=experts, TOP_K=top_k, H=hidden, BLOCK=1024, **early,
    )  # fmt: skip
    return output


def _general_products(
    x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating,
    tilings: tuple[GroupedTiling, GroupedTiling], top_k: int, pairs: Tensor | None, blocks: Tensor, inner: Tensor, parts: Tensor,
    early: dict[str, bool], output: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes `inner` and `parts`; for a single token, whose ids are the `blocks`, also `output`."""
    (experts, hidden, width), num_blocks, columns = w2.shape, blocks.shape[1], triton.cdiv(w2.shape[1], tilings[1].n)
    counters = 0 if output is None else triton.next_power_of_2(columns)
    arrived = torch.empty(counters, dtype=torch.int32, device=x.device) if counters else None
    how = {
        "EXPERTS": experts, "TOP_K": top_k, "H": hidden, "WIDTH": width, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "COUNTERS": counters,
    }  # fmt: skip
    launch(
        grouped_first, (num_blocks * triton.cdiv(width, tilings[0].n),),
        x, pairs, blocks, w1, b1, inner, arrived, num_blocks, x.stride(0), *strides_of(w1, width), 0 if b1 is None else b1.stride(0),
        gating.limit, gating.alpha, HAS_BIAS=b1 is not None, **constants_of(gating), **tilings[0].constants, **how, **early,
    )  # fmt: skip
    launch(  # not early: beside the first product its programs would crowd some multiprocessors
        grouped_second, (num_blocks * columns,),
        inner, pairs, blocks, weights, w2, b2, parts, output, arrived, num_blocks, *w2.stride(), 0 if b2 is None else b2.stride(0),
        HAS_BIAS=b2 is not None, EARLY=early["EARLY"], **tilings[1].constants, **how,
    )  # fmt: skip


def sorted_pairs(ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """(pairs [T k] by expert, blocks [3, their maximum number] of `block` pairs each, counts [at least E]): see `sort_pairs`; int32."""
    num_pairs, padded = ids.numel(), triton.next_power_of_2(experts)
    num_blocks = num_pairs // block + min(experts, num_pairs)
    blocks = torch.empty((3, num_blocks), dtype=torch.int32, device=ids.device)
    how = {"EXPERTS": experts, "E": padded, "BLOCK_M": block, "BLOCK": SORTED_AT_ONCE}
    if num_pairs <= ONE_PROGRAM:
        counts, pairs = (torch.empty(size, dtype=torch.int32, device=ids.device) for size in (2 * padded, num_pairs))
        launch(sort_few_pairs, (1,), ids, counts, pairs, blocks, num_pairs, num_blocks, **how, **early_start(ids.device))
        return pairs, blocks, counts
    counts = torch.zeros(padded, dtype=torch.int32, device=ids.device)
    # Not halves of one tensor: the second could start at any multiple of 4 bytes, for which Triton recompiles the kernels.
    ranks, pairs = (torch.empty(num_pairs, dtype=torch.int32, device=ids.device) for _ in range(2))
    launch(count_pairs, (triton.cdiv(num_pairs, SORTED_AT_ONCE),), ids, counts, ranks, num_pairs, EXPERTS=experts, BLOCK=SORTED_AT_ONCE)
    launch(sort_pairs, (triton.cdiv(num_pairs, SORTED_AT_ONCE),), ids, counts, ranks, pairs, blocks, num_pairs, num_blocks, **how)
    return pairs, blocks, counts
