"""Sorts pairs of a token and one of its experts by expert, and lists the blocks that the products run over. The GPU decides in which order
an expert gets its pairs: each pair is computed independently, so the order changes no numbers."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def sort_few_pairs(
    ids, counts, pairs, blocks, num_pairs, num_blocks,
    EXPERTS: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`count_pairs` and `sort_pairs` in one launch of one program; counts [2 E] need not be zero."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    every = tl.arange(0, E)
    tl.store(counts + every, tl.zeros([E], tl.int32))
    tl.debug_barrier()
    for start in range(0, num_pairs, BLOCK):
        expert, served = _experts_of(ids, start, num_pairs, EXPERTS, BLOCK)
        tl.atomic_add(counts + tl.where(served, expert, 0), 1, mask=served, sem="relaxed")
    tl.debug_barrier()
    count = tl.load(counts + every, volatile=True)
    tl.store(counts + E + every, tl.cumsum(count, 0) - count)
    tl.debug_barrier()
    for start in range(0, num_pairs, BLOCK):
        expert, served = _experts_of(ids, start, num_pairs, EXPERTS, BLOCK)
        slot = tl.atomic_add(counts + E + tl.where(served, expert, 0), 1, mask=served, sem="relaxed")
        tl.store(pairs + slot, start + tl.arange(0, BLOCK), mask=served)
    _write_blocks(count, blocks, num_blocks, EXPERTS, E, BLOCK_M, BLOCK)


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs(ids, counts, ranks, num_pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """counts [E], initially zero: pairs of each expert; ranks [S]: rank of each pair among its expert's."""
    start = tl.program_id(0) * BLOCK
    expert, served = _experts_of(ids, start, num_pairs, EXPERTS, BLOCK)
    rank = tl.atomic_add(counts + tl.where(served, expert, 0), 1, mask=served, sem="relaxed")
    tl.store(ranks + start + tl.arange(0, BLOCK), rank, mask=served)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def sort_pairs(
    ids, counts, ranks, pairs, blocks, num_pairs, num_blocks,
    EXPERTS: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """pairs [S]: those of expert 0, then those of expert 1, and so on; blocks [3, B]: each block's expert (EXPERTS after the last block),
    its first slot, and the end of its expert's slots. E: a power of 2, at least EXPERTS."""
    start = tl.program_id(0) * BLOCK
    expert, served = _experts_of(ids, start, num_pairs, EXPERTS, BLOCK)
    every = tl.arange(0, E)
    count = tl.load(counts + every)
    first = tl.sum(tl.where(every[None, :] < expert[:, None], count[None, :], 0), 1)
    pair = start + tl.arange(0, BLOCK)
    rank = tl.load(ranks + pair, mask=served, other=0)
    tl.store(pairs + first + rank, pair, mask=served)
    if start == 0:
        _write_blocks(count, blocks, num_blocks, EXPERTS, E, BLOCK_M, BLOCK)


@triton.jit
def _experts_of(ids, start, num_pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    pair = start + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=EXPERTS).to(tl.int32)
    return expert, expert < EXPERTS


@triton.jit
def _write_blocks(count, blocks, num_blocks, EXPERTS: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Writes each expert's first block, then each one's second, and so on: most have one or two."""
    expert = tl.arange(0, E)
    own = (count + BLOCK_M - 1) // BLOCK_M
    ends, pair_ends = tl.cumsum(own, 0), tl.cumsum(count, 0)
    for j in range(0, tl.max(own, 0)):
        block, mask = ends - own + j, j < own
        tl.store(blocks + block, expert, mask=mask)
        tl.store(blocks + num_blocks + block, pair_ends - count + j * BLOCK_M, mask=mask)
        tl.store(blocks + 2 * num_blocks + block, pair_ends, mask=mask)
    for start in range(tl.sum(own, 0), num_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        tl.store(blocks + block, tl.full([BLOCK], EXPERTS, tl.int32), mask=block < num_blocks)
