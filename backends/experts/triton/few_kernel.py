"""Experts of a few tokens: a matrix-vector product for each token and each of its experts.

All is memory: a token's expert is read once, row block by row block, and the products are added up in float32 in an order that no other
token changes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.experts.triton.gate import activated, gated


@triton.jit
def few_first(
    x, ids, w1, b1, inner, x_stride, expert_stride, row_stride, column_stride, bias_stride, limit, alpha,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, UP: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_ALPHA: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """inner [T k, I] of x [T, H], ids [T, k], w1 [E, rows, H]: gate i is row i STEP, up i is row i STEP + UP."""
    pair = tl.program_id(0)
    expert = tl.load(ids + pair)
    if expert >= EXPERTS:
        return
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    own = i < WIDTH
    row = x + (pair // TOP_K).to(tl.int64) * x_stride
    rows = w1 + expert.to(tl.int64) * expert_stride + (i * STEP).to(tl.int64)[:, None] * row_stride
    gate = tl.zeros([BLOCK_I, BLOCK_H], tl.float32)
    up = tl.zeros([BLOCK_I, BLOCK_H], tl.float32)
    for start in range(0, H, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        value = tl.load(row + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
        mask = own[:, None] & (h < H)[None, :]
        at = rows + h[None, :] * column_stride
        gate += value * tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            up += value * tl.load(at + UP * row_stride, mask=mask, other=0.0).to(tl.float32)
    first = tl.sum(gate, 1)
    if HAS_BIAS:
        first += tl.load(b1 + expert.to(tl.int64) * bias_stride + i * STEP, mask=own, other=0.0).to(tl.float32)
    if GATED:
        second = tl.sum(up, 1)
        if HAS_BIAS:
            second += tl.load(b1 + expert.to(tl.int64) * bias_stride + i * STEP + UP, mask=own, other=0.0).to(tl.float32)
        result = gated(first, second, limit, alpha, ACTIVATION, HAS_LIMIT, HAS_ALPHA)
    else:
        result = activated(first, ACTIVATION)
    tl.store(inner + pair.to(tl.int64) * WIDTH + i, result.to(inner.dtype.element_ty), mask=own)


@triton.jit
def few_second(
    inner, ids, weights, w2, b2, output, expert_stride, row_stride, column_stride, bias_stride,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """output [T, H] = sum over a token's experts of weight (inner w2[expert]^T + b2[expert])."""
    token = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    own = h < H
    total = tl.zeros([BLOCK_H, BLOCK_I], tl.float32)
    bias = tl.zeros([BLOCK_H], tl.float32)
    for j in range(TOP_K):
        pair = token * TOP_K + j
        expert = tl.load(ids + pair)
        if expert < EXPERTS:
            weight = tl.load(weights + pair).to(tl.float32)
            rows = w2 + expert.to(tl.int64) * expert_stride + h.to(tl.int64)[:, None] * row_stride
            for start in range(0, WIDTH, BLOCK_I):
                i = start + tl.arange(0, BLOCK_I)
                value = weight * tl.load(inner + pair.to(tl.int64) * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
                mask = own[:, None] & (i < WIDTH)[None, :]
                total += value[None, :] * tl.load(rows + i[None, :] * column_stride, mask=mask, other=0.0).to(tl.float32)
            if HAS_BIAS:
                bias += weight * tl.load(b2 + expert.to(tl.int64) * bias_stride + h, mask=own, other=0.0).to(tl.float32)
    tl.store(output + token.to(tl.int64) * H + h, (tl.sum(total, 1) + bias).to(output.dtype.element_ty), mask=own)
