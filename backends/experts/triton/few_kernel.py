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
            gate, up = _two_rows(row, weight, up_stride, bias, i, row_stride, column_stride, WIDTH, H, HAS_BIAS, BLOCK_I, BLOCK_H)
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
def _two_rows(
    x, weight, up_stride, bias, rows, row_stride, column_stride, ROWS: tl.constexpr, H: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Two of `_rows`, of gates and of ups, whose weights are all requested before any sum waits for other warps."""
    gates, ups = tl.zeros([BLOCK_I, BLOCK_H], tl.float32), tl.zeros([BLOCK_I, BLOCK_H], tl.float32)
    at = weight + rows[:, None] * row_stride
    for start in tl.range(0, H, BLOCK_H, loop_unroll_factor=4):
        h = start + tl.arange(0, BLOCK_H)
        of_gate, of_up = at + h[None, :] * column_stride, at + up_stride + h[None, :] * column_stride
        if ROWS % BLOCK_I == 0 and H % BLOCK_H == 0:
            gate, up, value = tl.load(of_gate), tl.load(of_up), tl.load(x + h)
        else:
            mask = (rows < ROWS)[:, None] & (h < H)[None, :]
            gate, up, value = (
                tl.load(of_gate, mask=mask, other=0.0),
                tl.load(of_up, mask=mask, other=0.0),
                tl.load(x + h, mask=h < H, other=0.0),
            )
        gates += value.to(tl.float32)[None, :] * gate.to(tl.float32)
        ups += value.to(tl.float32)[None, :] * up.to(tl.float32)
    gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
    if HAS_BIAS:
        gate += tl.load(bias + rows, mask=rows < ROWS, other=0.0).to(tl.float32)
        up += tl.load(bias + ROWS + rows, mask=rows < ROWS, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def few_second(
    inner, ids, weights, w2, b2, output, expert_stride, row_stride, column_stride, bias_stride,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """output [T, H] = sum over a token's experts of weight (inner w2[expert]^T + b2[expert])."""
    token = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    # Loaded while `few_first` ends, which has waited for the kernel that wrote the ids. From the L2, since an L1 may hold old values.
    expert = tl.load(ids + token * TOP_K, cache_modifier=".cg")
    tile = _tile(_expert(w2, expert, h, expert_stride, row_stride), h, expert < EXPERTS, 0, column_stride, H, WIDTH, BLOCK_H, BLOCK_I)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total, bias = tl.zeros([BLOCK_H, BLOCK_I], tl.float32), tl.zeros([BLOCK_H], tl.float32)
    for j in tl.static_range(TOP_K):  # no branches, so that later experts' weights are requested while earlier ones arrive
        if j > 0:
            expert = tl.load(ids + token * TOP_K + j)
        there, at = expert < EXPERTS, _expert(w2, expert, h, expert_stride, row_stride)
        if j > 0:
            tile = _tile(at, h, there, 0, column_stride, H, WIDTH, BLOCK_H, BLOCK_I)
        weight = tl.load(weights + token * TOP_K + j, mask=there, other=0.0).to(tl.float32)
        row = inner + (token * TOP_K + j).to(tl.int64) * WIDTH
        total = _add_tile(total, tile, weight, row, there, 0, WIDTH, BLOCK_H, BLOCK_I)
        for start in range(BLOCK_I, WIDTH, BLOCK_I):
            other = _tile(at, h, there, start, column_stride, H, WIDTH, BLOCK_H, BLOCK_I)
            total = _add_tile(total, other, weight, row, there, start, WIDTH, BLOCK_H, BLOCK_I)
        if HAS_BIAS:
            bias += weight * tl.load(b2 + expert.to(tl.int64) * bias_stride + h, mask=there & (h < H), other=0.0).to(tl.float32)
    tl.store(output + token.to(tl.int64) * H + h, (tl.sum(total, 1) + bias).to(output.dtype.element_ty), mask=h < H)


@triton.jit
def _expert(w2, expert, h, expert_stride, row_stride):
    """Where rows of an expert's weight begin."""
    return w2 + expert.to(tl.int64) * expert_stride + h[:, None] * row_stride


@triton.jit
def _tile(at, h, there, start, column_stride, H: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr):
    """Columns of rows `h` of a weight; 0 if there is no such expert."""
    i = start + tl.arange(0, BLOCK_I)
    if H % BLOCK_H == 0 and WIDTH % BLOCK_I == 0:
        mask = tl.full([BLOCK_H, BLOCK_I], True, tl.int1) & there
    else:
        mask = ((h < H)[:, None] & (i < WIDTH)[None, :]) & there
    return tl.load(at + i[None, :] * column_stride, mask=mask, other=0.0)


@triton.jit
def _add_tile(total, tile, weight, row, there, start, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr):
    i = start + tl.arange(0, BLOCK_I)
    # Loaded for every row: as one row, it would reach the tile's threads through shared memory, and loads do not pass its barriers.
    at, mask = tl.broadcast_to((row + i)[None, :], [BLOCK_H, BLOCK_I]), tl.broadcast_to(((i < WIDTH) & there)[None, :], [BLOCK_H, BLOCK_I])
    return total + weight * tl.load(at, mask=mask, other=0.0).to(tl.float32) * tile.to(tl.float32)
