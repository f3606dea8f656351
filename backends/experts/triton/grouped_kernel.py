"""The two products of experts over sorted pairs, and the sum over each token's experts."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.experts.triton.gate import activated, gated


@triton.jit(do_not_specialize=["num_blocks"])
def grouped_first(
    x, pairs, blocks, w1, b1, inner, arrived, num_blocks, x_stride, expert_stride, up_stride, row_stride, column_stride, bias_stride,
    limit, alpha,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_ALPHA: tl.constexpr,
    GATE_SOFTCAP: tl.constexpr, UP_SOFTCAP: tl.constexpr, UP_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    COUNTERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The first product and the gate: inner [T k, I], a row for each pair of a token and its expert, of x [T, H] and w1 [E, rows, H]. The
    rows of w1 are as in `few_first`.

    COUNTERS is 0, or for a single token a power of 2: `blocks` are then its ids, each a block by itself, and `arrived` is zeroed.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if COUNTERS > 0:
        if tl.program_id(0) == 0:
            tl.store(arrived + tl.arange(0, COUNTERS), tl.zeros([COUNTERS], tl.int32))
    columns: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // columns
    expert = tl.load(blocks + block)
    if expert >= EXPERTS:
        return
    pair, real = _pairs_of(pairs, blocks, block, num_blocks, BLOCK_M, COUNTERS)
    column = tl.program_id(0) % columns
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = x + (pair // TOP_K).to(tl.int64)[:, None] * x_stride
    weight = w1 + expert.to(tl.int64) * expert_stride
    bias = b1
    if HAS_BIAS:
        bias = b1 + expert.to(tl.int64) * bias_stride
    if GATED:
        if INTERLEAVED:
            both = column * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
            value = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
            for start in range(0, H, BLOCK_K):
                left = _left(rows, start, H, BLOCK_K)
                right = _right(weight, both, start, row_stride, column_stride, 2 * WIDTH, H, 2 * BLOCK_N, BLOCK_K)
                value = tl.dot(left, right, value, input_precision=PRECISION)
            if HAS_BIAS:
                value += tl.load(bias + both, mask=both < 2 * WIDTH, other=0.0).to(tl.float32)[None, :]
            gate, up = tl.split(tl.reshape(value, [BLOCK_M, BLOCK_N, 2]))
        else:
            gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            ups = weight + up_stride
            for start in range(0, H, BLOCK_K):
                left = _left(rows, start, H, BLOCK_K)
                right = _right(weight, n, start, row_stride, column_stride, WIDTH, H, BLOCK_N, BLOCK_K)
                gate = tl.dot(left, right, gate, input_precision=PRECISION)
                right = _right(ups, n, start, row_stride, column_stride, WIDTH, H, BLOCK_N, BLOCK_K)
                up = tl.dot(left, right, up, input_precision=PRECISION)
            if HAS_BIAS:
                gate += tl.load(bias + n, mask=n < WIDTH, other=0.0).to(tl.float32)[None, :]
                up += tl.load(bias + WIDTH + n, mask=n < WIDTH, other=0.0).to(tl.float32)[None, :]
        result = gated(gate, up, limit, alpha, ACTIVATION, HAS_LIMIT, HAS_ALPHA, GATE_SOFTCAP, UP_SOFTCAP, UP_FIRST)
    else:
        value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, H, BLOCK_K):
            left = _left(rows, start, H, BLOCK_K)
            right = _right(weight, n, start, row_stride, column_stride, WIDTH, H, BLOCK_N, BLOCK_K)
            value = tl.dot(left, right, value, input_precision=PRECISION)
        if HAS_BIAS:
            value += tl.load(bias + n, mask=n < WIDTH, other=0.0).to(tl.float32)[None, :]
        result = activated(value, ACTIVATION)
    at = inner + pair.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(at, result.to(inner.dtype.element_ty), mask=real[:, None] & (n < WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_blocks"])
def grouped_second(
    inner, pairs, blocks, weights, w2, b2, parts, output, arrived, num_blocks, expert_stride, row_stride, column_stride, bias_stride,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    COUNTERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """parts [T k, H], by pair: weight (inner w2[expert]^T + b2[expert]). EARLY: the next kernel may be launched beside this one.

    With COUNTERS (see `grouped_first`) the last program of some columns adds up the parts of all experts, as `sum_parts` does.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    columns: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    block, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(blocks + block)
    if expert < EXPERTS:
        pair, real = _pairs_of(pairs, blocks, block, num_blocks, BLOCK_M, COUNTERS)
        rows = inner + pair.to(tl.int64)[:, None] * WIDTH
        weight = w2 + expert.to(tl.int64) * expert_stride
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            left = _left(rows, start, WIDTH, BLOCK_K)
            right = _right(weight, n, start, row_stride, column_stride, H, WIDTH, BLOCK_N, BLOCK_K)
            total = tl.dot(left, right, total, input_precision=PRECISION)
        if HAS_BIAS:
            total += tl.load(b2 + expert.to(tl.int64) * bias_stride + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
        total *= tl.load(weights + pair).to(tl.float32)[:, None]
        at = parts + pair.to(tl.int64)[:, None] * H + n[None, :]
        tl.store(at, total.to(parts.dtype.element_ty), mask=real[:, None] & (n < H)[None, :])
    if COUNTERS > 0:
        tl.debug_barrier()  # every thread must have written its part before the counting thread announces it
        if tl.atomic_add(arrived + column, 1, sem="acq_rel") == TOP_K - 1:
            _add_up(parts, blocks, output, 0, n, EXPERTS, TOP_K, H)


@triton.jit
def sum_parts(parts, ids, output, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """output [T, H]: the sum of a token's parts in float32, in their order; ids of no expert are skipped."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _add_up(parts, ids, output, tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), EXPERTS, TOP_K, H)


@triton.jit
def _add_up(parts, ids, output, token, h, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr):
    total = tl.zeros(h.shape, tl.float32)
    for j in tl.static_range(TOP_K):
        served = tl.load(ids + token * TOP_K + j) < EXPERTS
        part = tl.load(parts + (token * TOP_K + j) * H + h, mask=served & (h < H), other=0.0, cache_modifier=".cg")  # by all programs
        total += part.to(tl.float32)
    tl.store(output + token * H + h, total.to(output.dtype.element_ty), mask=h < H)


@triton.jit
def _pairs_of(pairs, blocks, block, num_blocks, BLOCK_M: tl.constexpr, COUNTERS: tl.constexpr):
    """A block's pairs, and which of them are real: other rows are computed, but not stored."""
    row = tl.arange(0, BLOCK_M)
    if COUNTERS > 0:
        pair, real = block + row * 0, row == 0
    else:
        slot = tl.load(blocks + num_blocks + block) + row
        real = slot < tl.load(blocks + 2 * num_blocks + block)
        pair = tl.load(pairs + slot, mask=real, other=0)
    return pair, real


@triton.jit
def _left(rows, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    k = start + tl.arange(0, BLOCK_K)
    if K % BLOCK_K == 0:
        tile = tl.load(rows + k[None, :])
    else:
        tile = tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0)
    return tile


@triton.jit
def _right(weight, n, start, row_stride, column_stride, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    k = start + tl.arange(0, BLOCK_K)
    at = weight + n[None, :] * row_stride + k[:, None] * column_stride
    if N % BLOCK_N == 0 and K % BLOCK_K == 0:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
    return tile
