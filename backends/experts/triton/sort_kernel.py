"""Pairs of a token and one of its experts, sorted by expert. In which order an expert gets its pairs is left to the GPU: each pair's
numbers are computed by themselves, whatever lies beside them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_pairs(ids, counts, ranks, num_pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """counts [E], zeros before: pairs of each expert; ranks [S]: of each pair among its expert's."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = pair < num_pairs
    expert = tl.load(ids + pair, mask=own, other=EXPERTS).to(tl.int32)
    served = expert < EXPERTS
    rank = tl.atomic_add(counts + tl.where(served, expert, 0), 1, mask=served, sem="relaxed")
    tl.store(ranks + pair, rank, mask=own)


@triton.jit
def sort_pairs(ids, counts, ranks, pairs, num_pairs, EXPERTS: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):
    """pairs [S]: those of expert 0, then those of expert 1, and so on; E: a power of 2 from EXPERTS on."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = pair < num_pairs
    expert = tl.load(ids + pair, mask=own, other=EXPERTS).to(tl.int32)
    every = tl.arange(0, E)
    count = tl.load(counts + every, mask=every < EXPERTS, other=0)
    first = tl.sum(tl.where(every[None, :] < expert[:, None], count[None, :], 0), 1)
    rank = tl.load(ranks + pair, mask=own, other=0)
    tl.store(pairs + first + rank, pair, mask=own & (expert < EXPERTS))


@triton.jit
def block_of(counts, block, EXPERTS: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, its first pair in the block, where its pairs end) of a block of the sorted pairs; EXPERTS beyond the last block."""
    every = tl.arange(0, E)
    count = tl.load(counts + every, mask=every < EXPERTS, other=0)
    blocks = (count + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum(tl.where(tl.cumsum(blocks, 0) <= block, 1, 0), 0)
    expert = tl.minimum(expert, EXPERTS)
    before = tl.sum(tl.where(every < expert, count, 0), 0)
    blocks_before = tl.sum(tl.where(every < expert, blocks, 0), 0)
    start = before + (block - blocks_before) * BLOCK_M
    end = before + tl.sum(tl.where(every == expert, count, 0), 0)
    return expert, start, end
