"""Gated DeltaNet: a decoding row's gates, delta rule and gated norm in one kernel; gates and norm alone, around the rule for prompts."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.scans.triton.steps_kernel import row_and_slot, wait


@triton.jit
def net_step(
    query, key, value, a, b, z, a_log, dt_bias, scale, output, states, rows, slots, q_row, q_head, q_dim, k_row, k_head, k_dim, v_row,
    v_head, v_dim, a_row, b_row, z_row, output_row, slot_stride, factor, eps, offset, q_scale, unit_eps,
    A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr, REPEATS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NORMALISE: tl.constexpr,
    SILU: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A head's whole state [K, V], with its gates from and its norm to the row. Grid (decoding rows, H); A, B and Z name the columns of
    the rows a, b and z."""
    row, slot = row_and_slot(rows, slots, HAS_ROWS)
    head, k, v = tl.program_id(1), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    state = states + slot * slot_stride + (head * K + k[:, None]).to(tl.int64) * V + v[None]
    real = (k < K)[:, None] & (v < V)[None] & (slot != 0)
    now = tl.load(state, mask=real, other=0.0).to(tl.float32)
    rate, bias = tl.load(a_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    factors = tl.load(scale + v, mask=v < V, other=0.0).to(tl.float32) + offset
    wait(EARLY)
    q_k = tl.load(query + row * q_row + (head // REPEATS) * q_head + k * q_dim, mask=k < K, other=0.0).to(tl.float32)
    k_k = tl.load(key + row * k_row + (head // REPEATS) * k_head + k * k_dim, mask=k < K, other=0.0).to(tl.float32)
    v_v = tl.load(value + row * v_row + head * v_head + v * v_dim, mask=v < V, other=0.0).to(tl.float32)
    gate = tl.load(z + row * z_row + column_in(head * V + v, Z), mask=v < V, other=0.0).to(tl.float32)
    decay = decay_of(tl.load(a + row * a_row + column_in(head, A)).to(tl.float32), rate, bias)
    beta = factor * tl.sigmoid(tl.load(b + row * b_row + column_in(head, B)).to(tl.float32))
    if NORMALISE:
        q_k *= tl.rsqrt(tl.sum(q_k * q_k, 0) + unit_eps)
        k_k *= tl.rsqrt(tl.sum(k_k * k_k, 0) + unit_eps)
    now *= tl.exp(decay)
    v_v = (v_v - tl.sum(now * k_k[:, None], 0)) * beta
    now += k_k[:, None] * v_v[None]
    tl.store(state, now.to(states.dtype.element_ty), mask=real)
    read = tl.sum(now * q_k[:, None], 0) * q_scale
    result = tl.where(slot != 0, gated_norm(read, gate, factors, eps, V, 0, SILU), 0.0)  # no NaN of a padding row
    tl.store(output + row * output_row + head * V + v, result.to(output.dtype.element_ty), mask=v < V)


@triton.jit(do_not_specialize=["tokens"])
def net_gates(
    a, b, a_log, dt_bias, g, beta, tokens, a_row, b_row, factor, A: tl.constexpr, B: tl.constexpr, HEADS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """g and beta [T, HEADS]; grid (cdiv(T, TOKENS),)."""
    row, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None].to(tl.int64), tl.arange(0, BLOCK_H)[None]
    own, real = head < HEADS, (row < tokens) & (head < HEADS)
    rate, bias = tl.load(a_log + head, mask=own, other=0.0).to(tl.float32), tl.load(dt_bias + head, mask=own, other=0.0).to(tl.float32)
    decay = decay_of(tl.load(a + row * a_row + column_in(head, A), mask=real, other=0.0).to(tl.float32), rate, bias)
    tl.store(g + row * HEADS + head, decay, mask=real)
    learned = tl.load(b + row * b_row + column_in(head, B), mask=real, other=0.0).to(tl.float32)
    tl.store(beta + row * HEADS + head, factor * tl.sigmoid(learned), mask=real)


@triton.jit
def net_norm(
    z, scale, output, rows, z_row, output_row, eps, offset, Z: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gated norm of the given rows of output [T, HEADS, V], in place; grid (rows, cdiv(HEADS, BLOCK_H))."""
    row = tl.load(rows + tl.program_id(0))
    head, v = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None], tl.arange(0, BLOCK_V)[None]
    real = (head < HEADS) & (v < V)
    factors = tl.load(scale + v, mask=v < V, other=0.0).to(tl.float32) + offset
    out = output + row * output_row + head * V + v
    x = tl.load(out, mask=real, other=0.0).to(tl.float32)
    gate = tl.load(z + row * z_row + column_in(head * V + v, Z), mask=real, other=0.0).to(tl.float32)
    tl.store(out, gated_norm(x, gate, factors, eps, V, 1, SILU).to(output.dtype.element_ty), mask=real)


@triton.jit
def gated_norm(x, gate, factors, eps, V: tl.constexpr, AXIS: tl.constexpr, SILU: tl.constexpr):
    """Over x's last axis, of V elements and zeros."""
    mean = tl.sum(x * x, AXIS, keep_dims=True) / V
    opened = tl.sigmoid(gate)
    if SILU:
        opened *= gate
    return x * tl.rsqrt(mean + eps) * factors * opened


@triton.jit
def decay_of(a, rate, bias):
    """-exp(rate) softplus(a + bias)"""
    total = a + bias
    return -tl.exp(rate) * tl.where(total > 20.0, total, tl.log(1.0 + tl.exp(tl.minimum(total, 20.0))))


@triton.jit
def column_in(index, PART: tl.constexpr):
    """The column of the index-th element, where PART is (first column, groups, distance between groups, width)."""
    return PART[0] + index // PART[3] * PART[2] + index % PART[3]
