"""y = x @ weight^T for few rows of x, as fast as the weight can be read: stream-K over (tile of outputs, block of inputs).

x [rows, K], any row stride; weight [N, K] and y [rows, N] contiguous; bias [N]. The blocks of all tiles laid end to end are dealt to the
programs in equal runs, and one loop goes through a run, so that the loads of the next tile are under way before a tile is finished. A cut
tile leaves a float32 part in `partial` [2 * programs, BLOCK_N, ROWS] (a program has at most two: one of a tile that begins before its run,
one of a tile that begins in it); the program that adds the last part of a tile sums them in order and zeroes the tile's counter, for the
next launch. With WHOLE no tile is cut. (Stream-K: Osama et al., 2023, https://arxiv.org/abs/2301.03598.)

With EARLY the program starts before the kernel in front has ended (programmatic dependent launch) and asks the L2 cache for its first
blocks of the weight. That reads nothing yet, so that it is right even if the kernel in front writes the weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

MERGE_PARTS = tl.constexpr(4)


@triton.jit
def _ask_for(weight, begin, end, N: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             PREFETCH: tl.constexpr):  # fmt: skip
    """Bring the first PREFETCH blocks of a run into the L2 cache, a line of 128 bytes per thread."""
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K // 64) * 64
    for i in tl.static_range(PREFETCH):
        item = tl.minimum(begin + i, end - 1)
        row = tl.minimum(item // BLOCKS * BLOCK_N + n, N - 1).to(tl.int64)
        column = tl.minimum(item % BLOCKS * BLOCK_K + k, K - 1)
        at = (weight + (row * K)[:, None] + column[None, :]).to(tl.int64)
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _store(acc, tile, y, bias, rows, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """acc [BLOCK_N, ROWS] is a tile's sum."""
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, ROWS)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(y + t[None, :] * N + n[:, None], acc.to(y.dtype.element_ty), mask=(t < rows)[None, :] & (n < N)[:, None])


@triton.jit
def _program_of(item, SHARE: tl.constexpr, LONGER: tl.constexpr):
    """Which program has the item: the first LONGER programs have SHARE + 1 items each, the others SHARE."""
    return tl.where(item < LONGER * (SHARE + 1), item // (SHARE + 1), LONGER + (item - LONGER * (SHARE + 1)) // SHARE)


@triton.jit(do_not_specialize=["rows"])
def skinny_linear_kernel(x, weight, bias, y, partial, counters, rows, x_stride,
                         N: tl.constexpr, K: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
                         BLOCK_K: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHT_LEFT: tl.constexpr,
                         HINTS: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr, PREFETCH: tl.constexpr):  # fmt: skip
    """Grid (PROGRAMS,), of which none is without work; rows <= ROWS; counters [PROGRAMS] int32 are zero before and after."""
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TOTAL: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * BLOCKS
    UNIT: tl.constexpr = BLOCKS if WHOLE else 1
    SHARE: tl.constexpr = TOTAL // UNIT // PROGRAMS
    LONGER: tl.constexpr = TOTAL // UNIT % PROGRAMS
    FOR_WEIGHT: tl.constexpr = "evict_first" if HINTS else ""
    FOR_X: tl.constexpr = "evict_last" if HINTS else ""
    program = tl.program_id(0)
    begin = (program * SHARE + tl.minimum(program, LONGER)) * UNIT
    end = ((program + 1) * SHARE + tl.minimum(program + 1, LONGER)) * UNIT
    if EARLY:
        _ask_for(weight, begin, end, N, K, BLOCKS, BLOCK_N, BLOCK_K, PREFETCH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    t = tl.arange(0, ROWS)
    part_at = tl.arange(0, BLOCK_N)[:, None] * ROWS + t[None, :]
    if WEIGHT_LEFT:
        acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for item in tl.range(begin, end, num_stages=STAGES):
        tile = item // BLOCKS
        block = item % BLOCKS
        # Rows past N are the last one once more, and not stored.
        n = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), N - 1) if N % BLOCK_N else tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        w_at = weight + (n.to(tl.int64) * K)[:, None] + k[None, :]
        x_at = x + (t.to(tl.int64) * x_stride)[:, None] + k[None, :]
        if K % BLOCK_K:
            w = tl.load(w_at, mask=(k < K)[None, :], other=0.0, eviction_policy=FOR_WEIGHT)
            xs = tl.load(x_at, mask=(t < rows)[:, None] & (k < K)[None, :], other=0.0, eviction_policy=FOR_X)
        else:
            w = tl.load(w_at, eviction_policy=FOR_WEIGHT)
            xs = tl.load(x_at, mask=(t < rows)[:, None], other=0.0, eviction_policy=FOR_X)
        if WEIGHT_LEFT:
            acc = tl.dot(w, tl.trans(xs), acc)
        else:
            acc = tl.dot(xs, tl.trans(w), acc)
        if (block == BLOCKS - 1) | (item == end - 1):
            done = acc if WEIGHT_LEFT else tl.trans(acc)
            begins_here = tile * BLOCKS >= begin
            if WHOLE or begins_here & (block == BLOCKS - 1):
                _store(done, tile, y, bias, rows, N, BLOCK_N, ROWS, HAS_BIAS)
            else:
                slot = 2 * program
                if begins_here:
                    slot += 1
                tl.store(partial + slot * (BLOCK_N * ROWS) + part_at, done)
            acc = tl.zeros_like(acc)

    # After the loop, so that it has no barrier in it: count the parts of the first and of the last tile, and sum them if they are all there.
    if not WHOLE:
        side = tl.arange(0, 2)
        tiles = tl.where(side == 0, begin // BLOCKS, (end - 1) // BLOCKS)
        starts = tiles * BLOCKS
        cut = ((starts < begin) | (starts + BLOCKS > end)) & ((side == 0) | (begin // BLOCKS != (end - 1) // BLOCKS))
        firsts = _program_of(starts, SHARE, LONGER)
        parts = _program_of(starts + BLOCKS - 1, SHARE, LONGER) - firsts + 1
        tl.debug_barrier()  # every thread's part is written before the threads that count say so
        before = tl.atomic_add(counters + firsts, 1, mask=cut, sem="acq_rel")
        complete = (cut & (before == parts - 1)).to(tl.int32)
        for i in tl.static_range(2):
            if tl.sum(tl.where(side == i, complete, 0), 0) > 0:
                tile = begin // BLOCKS if i == 0 else (end - 1) // BLOCKS
                first = _program_of(tile * BLOCKS, SHARE, LONGER)
                count = _program_of(tile * BLOCKS + BLOCKS - 1, SHARE, LONGER) - first + 1
                tl.store(counters + first, 0)
                total = tl.zeros([BLOCK_N, ROWS], tl.float32)
                for p in tl.range(0, count, MERGE_PARTS):
                    found = ()  # all loads before all sums, so that they wait for memory together
                    for j in tl.static_range(MERGE_PARTS):
                        slot = tl.where(p + j == 0, 2 * first + 1, 2 * (first + p + j))
                        here = part_at * 0 + (p + j) < count
                        found = found + (
                            tl.load(partial + slot * (BLOCK_N * ROWS) + part_at, mask=here, other=0.0, cache_modifier=".cg"),
                        )
                    for j in tl.static_range(MERGE_PARTS):
                        total += found[j]
                _store(total, tile, y, bias, rows, N, BLOCK_N, ROWS, HAS_BIAS)
