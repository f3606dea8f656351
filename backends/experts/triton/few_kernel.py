"""Experts of a few tokens: a matrix-vector product for each token and each of its experts.

Memory is the only limit: a token's expert is read once, row block by row block, and the products are added up in float32, in an order that
does not depend on other tokens.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.experts.triton.gate import activated, gated


@triton.jit
def few_first(
    x, ids, w1, b1, inner, x_stride, expert_stride, up_stride, row_stride, column_stride, bias_stride, limit, alpha,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_ALPHA: tl.constexpr,
    GATE_SOFTCAP: tl.constexpr, UP_SOFTCAP: tl.constexpr, UP_FIRST: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """inner [T k, I] of x [T, H], ids [T, k], w1 [E, rows, H]; rows: all gates, then all ups after `up_stride`; or interleaved."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0)
    expert = tl.load(ids + pair)
    if expert >= EXPERTS:
        return
    weight = w1 + expert.to(tl.int64) * expert_stride
    row = x + (pair // TOP_K).to(tl.int64) * x_stride
    bias = b1
    if HAS_BIAS:
        bias = b1 + expert.to(tl.int64) * bias_stride
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    if GATED:
        if INTERLEAVED:
            both = tl.program_id(1) * 2 * BLOCK_I + tl.arange(0, 2 * BLOCK_I)
            value = _rows(row, weight, bias, both, row_stride, column_stride, 2 * WIDTH, H, HAS_BIAS, 2 * BLOCK_I, BLOCK_H)
            gate, up = tl.split(tl.reshape(value, [BLOCK_I, 2]))
        else:
            gate = _rows(row, weight, bias, i, row_stride, column_stride, WIDTH, H, HAS_BIAS, BLOCK_I, BLOCK_H)
            ups = weight + up_stride
            if HAS_BIAS:
                bias += WIDTH
            up = _rows(row, ups, bias, i, row_stride, column_stride, WIDTH, H, HAS_BIAS, BLOCK_I, BLOCK_H)
        result = gated(gate, up, limit, alpha, ACTIVATION, HAS_LIMIT, HAS_ALPHA, GATE_SOFTCAP, UP_SOFTCAP, UP_FIRST)
    else:
        value = _rows(row, weight, bias, i, row_stride, column_stride, WIDTH, H, HAS_BIAS, BLOCK_I, BLOCK_H)
        result = activated(value, ACTIVATION)
    tl.store(inner + pair.to(tl.int64) * WIDTH + i, result.to(inner.dtype.element_ty), mask=i < WIDTH)


@triton.jit
def _rows(
    x, weight, bias, rows, row_stride, column_stride, ROWS: tl.constexpr, H: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_I]: x [H] times some rows of a weight, plus their bias."""
    total = tl.zeros([BLOCK_I, BLOCK_H], tl.float32)
    at = weight + rows[:, None] * row_stride
    for start in tl.range(0, H, BLOCK_H, loop_unroll_factor=4):
        h = start + tl.arange(0, BLOCK_H)
        if ROWS % BLOCK_I == 0 and H % BLOCK_H == 0:
            total += tl.load(x + h).to(tl.float32)[None, :] * tl.load(at + h[None, :] * column_stride).to(tl.float32)
        else:
            value = tl.load(x + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
            mask = (rows < ROWS)[:, None] & (h < H)[None, :]
            total += value * tl.load(at + h[None, :] * column_stride, mask=mask, other=0.0).to(tl.float32)
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=rows < ROWS, other=0.0).to(tl.float32)
    return result


@triton.jit
def few_second(
    inner, ids, weights, w2, b2, output, expert_stride, row_stride, column_stride, bias_stride,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """output [T, H] = sum over a token's experts of weight (inner w2[expert]^T + b2[expert])."""
    token = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    own = h < H
    # Loaded while `few_first` ends, which has waited for the kernel that wrote the ids. From the L2, since an L1 may hold old values.
    expert = tl.load(ids + token * TOP_K, cache_modifier=".cg")
    at = w2 + tl.minimum(expert, EXPERTS - 1).to(tl.int64) * expert_stride + h[:, None] * row_stride
    tile = _tile(at, own, 0, column_stride, H, WIDTH, BLOCK_H, BLOCK_I)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([BLOCK_H, BLOCK_I], tl.float32)
    bias = tl.zeros([BLOCK_H], tl.float32)
    if expert < EXPERTS:
        total, bias = _add_expert(total, bias, tile, at, inner, weights, b2, token * TOP_K, expert, h, own, column_stride, bias_stride,
                                  H, WIDTH, HAS_BIAS, BLOCK_H, BLOCK_I)  # fmt: skip
    for j in range(1, TOP_K):
        other = tl.load(ids + token * TOP_K + j)
        if other < EXPERTS:
            start = w2 + other.to(tl.int64) * expert_stride + h[:, None] * row_stride
            first = _tile(start, own, 0, column_stride, H, WIDTH, BLOCK_H, BLOCK_I)
            total, bias = _add_expert(total, bias, first, start, inner, weights, b2, token * TOP_K + j, other, h, own, column_stride,
                                      bias_stride, H, WIDTH, HAS_BIAS, BLOCK_H, BLOCK_I)  # fmt: skip
    tl.store(output + token.to(tl.int64) * H + h, (tl.sum(total, 1) + bias).to(output.dtype.element_ty), mask=own)


@triton.jit
def _add_expert(
    total, bias, tile, at, inner, weights, b2, pair, expert, h, own, column_stride, bias_stride,
    H: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Adds a pair's products to the sums; `tile` holds the first columns of its weight."""
    weight = tl.load(weights + pair).to(tl.float32)
    row = inner + pair.to(tl.int64) * WIDTH
    total = _add_tile(total, tile, weight, row, 0, WIDTH, BLOCK_I)
    for start in range(BLOCK_I, WIDTH, BLOCK_I):
        other = _tile(at, own, start, column_stride, H, WIDTH, BLOCK_H, BLOCK_I)
        total = _add_tile(total, other, weight, row, start, WIDTH, BLOCK_I)
    if HAS_BIAS:
        bias += weight * tl.load(b2 + expert.to(tl.int64) * bias_stride + h, mask=own, other=0.0).to(tl.float32)
    return total, bias


@triton.jit
def _tile(at, own, start, column_stride, H: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr):
    i = start + tl.arange(0, BLOCK_I)
    if H % BLOCK_H == 0 and WIDTH % BLOCK_I == 0:
        tile = tl.load(at + i[None, :] * column_stride)
    else:
        tile = tl.load(at + i[None, :] * column_stride, mask=own[:, None] & (i < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def _add_tile(total, tile, weight, row, start, WIDTH: tl.constexpr, BLOCK_I: tl.constexpr):
    i = start + tl.arange(0, BLOCK_I)
    if WIDTH % BLOCK_I == 0:
        value = tl.load(row + i).to(tl.float32)
    else:
        value = tl.load(row + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    return total + (weight * value)[None, :] * tile.to(tl.float32)
