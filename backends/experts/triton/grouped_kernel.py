"""The two products of experts over sorted pairs, and the sum over each token's experts."""

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.experts.triton.gate import activated, gated
from paged_attn.backends.experts.triton.sort_kernel import block_of


@triton.jit
def grouped_first(
    x, pairs, counts, w1, b1, inner, x_stride, expert_stride, row_stride, column_stride, bias_stride, limit, alpha,
    EXPERTS: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, UP: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_ALPHA: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """inner [T k, I], by pair, of x [T, H] and w1 [E, rows, H]; rows as in `few_first`."""
    columns = tl.cdiv(WIDTH, BLOCK_N)
    expert, start, end = block_of(counts, tl.program_id(0) // columns, EXPERTS, E, BLOCK_M)
    if expert >= EXPERTS:
        return
    slot = start + tl.arange(0, BLOCK_M)
    real = slot < end
    pair = tl.load(pairs + slot, mask=real, other=0)
    n = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    own = n < WIDTH
    rows = x + (pair // TOP_K).to(tl.int64)[:, None] * x_stride
    weight = w1 + expert.to(tl.int64) * expert_stride + (n * STEP).to(tl.int64)[None, :] * row_stride
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, H, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        left = tl.load(rows + k[None, :], mask=real[:, None] & (k < H)[None, :], other=0.0)
        mask = (k < H)[:, None] & own[None, :]
        at = weight + k[:, None] * column_stride
        gate = tl.dot(left, tl.load(at, mask=mask, other=0.0), gate, input_precision=PRECISION)
        if GATED:
            up = tl.dot(left, tl.load(at + UP * row_stride, mask=mask, other=0.0), up, input_precision=PRECISION)
    if HAS_BIAS:
        gate += tl.load(b1 + expert.to(tl.int64) * bias_stride + n * STEP, mask=own, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if HAS_BIAS:
            up += tl.load(b1 + expert.to(tl.int64) * bias_stride + n * STEP + UP, mask=own, other=0.0).to(tl.float32)[None, :]
        result = gated(gate, up, limit, alpha, ACTIVATION, HAS_LIMIT, HAS_ALPHA)
    else:
        result = activated(gate, ACTIVATION)
    at = inner + pair.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(at, result.to(inner.dtype.element_ty), mask=real[:, None] & own[None, :])


@triton.jit
def grouped_second(
    inner, pairs, counts, weights, w2, b2, parts, expert_stride, row_stride, column_stride, bias_stride,
    EXPERTS: tl.constexpr, E: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """parts [T k, H], by pair: weight (inner w2[expert]^T + b2[expert])."""
    columns = tl.cdiv(H, BLOCK_N)
    expert, start, end = block_of(counts, tl.program_id(0) // columns, EXPERTS, E, BLOCK_M)
    if expert >= EXPERTS:
        return
    slot = start + tl.arange(0, BLOCK_M)
    real = slot < end
    pair = tl.load(pairs + slot, mask=real, other=0).to(tl.int64)
    n = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    own = n < H
    rows = inner + pair[:, None] * WIDTH
    weight = w2 + expert.to(tl.int64) * expert_stride + n.to(tl.int64)[None, :] * row_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, WIDTH, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        left = tl.load(rows + k[None, :], mask=real[:, None] & (k < WIDTH)[None, :], other=0.0)
        mask = (k < WIDTH)[:, None] & own[None, :]
        total = tl.dot(left, tl.load(weight + k[:, None] * column_stride, mask=mask, other=0.0), total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(b2 + expert.to(tl.int64) * bias_stride + n, mask=own, other=0.0).to(tl.float32)[None, :]
    total *= tl.load(weights + pair, mask=real, other=0.0).to(tl.float32)[:, None]
    tl.store(parts + pair[:, None] * H + n[None, :], total.to(parts.dtype.element_ty), mask=real[:, None] & own[None, :])


@triton.jit
def sum_parts(parts, ids, output, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    """output [T, H]: a token's parts, added up in float32 in their order; ids that no expert has are left out."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP_K):
        served = tl.load(ids + token * TOP_K + j) < EXPERTS
        total += tl.load(parts + (token * TOP_K + j) * H + h, mask=served & (h < H), other=0.0).to(tl.float32)
    tl.store(output + token * H + h, total.to(output.dtype.element_ty), mask=h < H)
