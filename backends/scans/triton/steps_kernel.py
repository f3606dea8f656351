"""Runs one token of each decoding request through its state, which is read once and written once."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_and_slot(rows, slots, HAS_ROWS: tl.constexpr):
    """Slot 0: padding."""
    i = tl.program_id(0)
    row = i.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows + i)
    return row, tl.load(slots + i).to(tl.int64)


@triton.jit
def wait(EARLY: tl.constexpr):
    """A kernel that is launched early reads its slot and the state in it before: an earlier step wrote them."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def gated_delta_kernel(
    query, key, value, g, beta, output, states, rows, slots, q_row, q_head, q_dim, k_row, k_head, k_dim, v_row, v_head, v_dim, g_row,
    g_head, g_dim, beta_row, beta_head, output_row, slot_stride, scale, eps, REPEATS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    NORMALISE: tl.constexpr, BY_CHANNEL: tl.constexpr, RULE: tl.constexpr, BEFORE: tl.constexpr, HAS_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of a head's state [K, V]: they decay, subtract what they return for the key, learn the value, and the query reads them.

    Without `RULE` they learn the value as it is; `BEFORE`: the query reads them first. `BY_CHANNEL`: g has one decay for each of the K
    channels, else a single one."""
    row, slot = row_and_slot(rows, slots, HAS_ROWS)
    head, k, v = tl.program_id(1), tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    out = output + row * output_row + head * V + v
    state = states + slot * slot_stride + (head * K + k[:, None]).to(tl.int64) * V + v[None]
    real = (k < K)[:, None] & (v < V)[None] & (slot != 0)
    now = tl.load(state, mask=real, other=0.0).to(tl.float32)
    wait(EARLY)
    if slot == 0:
        tl.store(out, tl.zeros([BLOCK_V], output.dtype.element_ty), mask=v < V)
    else:
        q_k = tl.load(query + row * q_row + (head // REPEATS) * q_head + k * q_dim, mask=k < K, other=0.0).to(tl.float32)
        k_k = tl.load(key + row * k_row + (head // REPEATS) * k_head + k * k_dim, mask=k < K, other=0.0).to(tl.float32)
        if NORMALISE:
            q_k *= tl.rsqrt(tl.sum(q_k * q_k, 0) + eps)
            k_k *= tl.rsqrt(tl.sum(k_k * k_k, 0) + eps)
        v_v = tl.load(value + row * v_row + head * v_head + v * v_dim, mask=v < V, other=0.0).to(tl.float32)
        if BEFORE:
            read = tl.sum(now * q_k[:, None], 0)
        rate = g + row * g_row + head * g_head
        if BY_CHANNEL:
            now *= tl.exp(tl.load(rate + k * g_dim, mask=k < K, other=0.0).to(tl.float32))[:, None]
        else:
            now *= tl.exp(tl.load(rate).to(tl.float32))
        if RULE:
            v_v = (v_v - tl.sum(now * k_k[:, None], 0)) * tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
        now += k_k[:, None] * v_v[None]
        tl.store(state, now.to(states.dtype.element_ty), mask=real)
        if not BEFORE:
            read = tl.sum(now * q_k[:, None], 0)
        tl.store(out, (read * scale).to(output.dtype.element_ty), mask=v < V)


@triton.jit
def mamba2_kernel(
    x, dt, a, b, c, output, states, rows, slots, x_row, x_head, x_dim, dt_row, dt_head, b_row, b_group, b_dim, c_row, c_group, c_dim,
    output_row, slot_stride, REPEATS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A head's rows of its state [P, N]."""
    row, slot = row_and_slot(rows, slots, HAS_ROWS)
    head, p, n = tl.program_id(1), tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    out = output + row * output_row + head * P + p
    state = states + slot * slot_stride + (head * P + p[:, None]).to(tl.int64) * N + n[None]
    real = (p < P)[:, None] & (n < N)[None] & (slot != 0)
    then = tl.load(state, mask=real, other=0.0).to(tl.float32)
    wait(EARLY)
    if slot == 0:
        tl.store(out, tl.zeros([BLOCK_P], output.dtype.element_ty), mask=p < P)
    else:
        step = tl.load(dt + row * dt_row + head * dt_head).to(tl.float32)
        new = tl.load(x + row * x_row + head * x_head + p * x_dim, mask=p < P, other=0.0).to(tl.float32) * step
        b_n = tl.load(b + row * b_row + (head // REPEATS) * b_group + n * b_dim, mask=n < N, other=0.0).to(tl.float32)
        c_n = tl.load(c + row * c_row + (head // REPEATS) * c_group + n * c_dim, mask=n < N, other=0.0).to(tl.float32)
        decay = tl.exp(step * tl.load(a + head).to(tl.float32))
        now = then * decay + new[:, None] * b_n[None]
        tl.store(state, now.to(states.dtype.element_ty), mask=real)
        tl.store(out, tl.sum(now * c_n[None], 1).to(output.dtype.element_ty), mask=p < P)


@triton.jit
def mamba1_kernel(
    x, dt, a, b, c, output, states, rows, slots, x_row, x_dim, dt_row, dt_dim, a_dim, a_state, b_row, b_dim, c_row, c_dim, output_row,
    slot_stride, C: tl.constexpr, N: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Some channels of a state [C, N]."""
    row, slot = row_and_slot(rows, slots, HAS_ROWS)
    channel, n = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    out = output + row * output_row + channel
    real = (channel < C)[:, None] & (n < N)[None]
    state = states + slot * slot_stride + channel[:, None] * N + n[None]
    then = tl.load(state, mask=real & (slot != 0), other=0.0).to(tl.float32)
    wait(EARLY)
    if slot == 0:
        tl.store(out, tl.zeros([BLOCK_C], output.dtype.element_ty), mask=channel < C)
    else:
        step = tl.load(dt + row * dt_row + channel * dt_dim, mask=channel < C, other=0.0).to(tl.float32)
        new = tl.load(x + row * x_row + channel * x_dim, mask=channel < C, other=0.0).to(tl.float32) * step
        b_n = tl.load(b + row * b_row + n * b_dim, mask=n < N, other=0.0).to(tl.float32)
        c_n = tl.load(c + row * c_row + n * c_dim, mask=n < N, other=0.0).to(tl.float32)
        rate = tl.load(a + channel[:, None] * a_dim + n[None] * a_state, mask=real, other=0.0).to(tl.float32)
        now = then * tl.exp(step[:, None] * rate) + new[:, None] * b_n[None]
        tl.store(state, now.to(states.dtype.element_ty), mask=real)
        tl.store(out, tl.sum(now * c_n[None], 1).to(output.dtype.element_ty), mask=channel < C)


@triton.jit
def channel_kernel(
    decay, x, output, states, rows, slots, decay_row, decay_dim, x_row, x_dim, output_row, slot_stride, C: tl.constexpr,
    MAXIMUM: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK_C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some channels of a state [C]: the output is the state before the token."""
    row, slot = row_and_slot(rows, slots, HAS_ROWS)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = channel < C
    out = output + row * output_row + channel
    state = states + slot * slot_stride + channel
    then = tl.load(state, mask=real & (slot != 0), other=0.0).to(tl.float32)
    wait(EARLY)
    if slot == 0:
        tl.store(out, tl.zeros([BLOCK_C], output.dtype.element_ty), mask=real)
    else:
        passed = tl.load(decay + row * decay_row + channel * decay_dim, mask=real, other=0.0).to(tl.float32)
        added = tl.load(x + row * x_row + channel * x_dim, mask=real, other=0.0).to(tl.float32)
        if MAXIMUM:
            now = tl.maximum(then + passed, added)
        else:
            now = then * passed + added
        tl.store(out, then.to(output.dtype.element_ty), mask=real)
        tl.store(state, now.to(states.dtype.element_ty), mask=real)
