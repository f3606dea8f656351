"""Launches the kernels of decoding rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paged_attn.attn_ops.scans.gated_delta import EPS
from paged_attn.attn_ops.scans.state_rows import StateRows
from paged_attn.backends.compiling.compile_ahead import launch
from paged_attn.backends.machine import blocks_of, early_start, power_of_2
from paged_attn.backends.scans.triton.steps_kernel import channel_kernel, gated_delta_kernel, mamba1_kernel, mamba2_kernel

MOST = 256  # largest state dimension that a program holds whole
NUMBERS = 4096  # elements of a state per program, about
# Trap: it may not depend on the number of rows (bits). H200, 128 x 128, us with 1 row, 128: 2.6, 142, with 4096 2.3, 161.
OF_PAIRS = 8192  # the same where states are of keys and values
PER_WARP = 4096  # with four times as many warps no faster
SINGLE = 1024  # of a state of single numbers


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, output: Tensor, normalise: bool, states: Tensor, rows: StateRows
) -> bool:
    """Computes `gated_delta_step`, with either g; False if keys are longer than a program can hold."""
    return _linear(query, key, value, g, beta, output, normalise, query.shape[2] ** -0.5, states, rows)


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, output: Tensor, before: bool, states: Tensor, rows: StateRows
) -> bool:
    """Computes `linear_attention_step`, with either g; False if keys are longer than a program can hold."""
    return _linear(query, key, value, g, None, output, False, 1.0, states, rows, before)


def _linear(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor | None, output: Tensor, normalise: bool, scale: float,
    states: Tensor, rows: StateRows, before: bool = False,
) -> bool:  # fmt: skip
    _, heads, k_dim, v_dim = states.shape
    if k_dim > MOST:
        return False
    block_k = power_of_2(k_dim)
    block_v = _block(v_dim, block_k, OF_PAIRS)
    by_channel = g.dim() == 3
    launch(
        gated_delta_kernel, (rows.num_decode, heads, blocks_of(v_dim, block_v)),
        query, key, value, g, beta, output, states, *_where(rows), *query.stride(), *key.stride(), *value.stride(), *g.stride(),
        *(() if by_channel else (0,)), *((0, 0) if beta is None else beta.stride()), output.stride(0), states.stride(0), scale, EPS,
        REPEATS=heads // key.shape[1], K=k_dim, V=v_dim, NORMALISE=normalise, BY_CHANNEL=by_channel, RULE=beta is not None, BEFORE=before,
        HAS_ROWS=rows.decode_rows is not None, BLOCK_K=block_k, BLOCK_V=block_v,
        num_warps=max(block_k * block_v // PER_WARP, 1), **early_start(states.device),
    )  # fmt: skip
    return True


def mamba2(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, output: Tensor, states: Tensor, rows: StateRows) -> bool:
    """Computes `mamba2_step`; False if a channel's state is larger than a program can hold."""
    _, heads, p_dim, n_dim = states.shape
    if n_dim > MOST:
        return False
    block_n = power_of_2(n_dim)
    block_p = _block(p_dim, block_n)
    launch(
        mamba2_kernel, (rows.num_decode, heads, blocks_of(p_dim, block_p)),
        x, dt, a.contiguous(), b, c, output, states, *_where(rows), *x.stride(), *dt.stride(), *b.stride(), *c.stride(), output.stride(0),
        states.stride(0), REPEATS=heads // b.shape[1], P=p_dim, N=n_dim, HAS_ROWS=rows.decode_rows is not None, BLOCK_P=block_p,
        BLOCK_N=block_n, num_warps=max(block_p * block_n // PER_WARP, 1), **early_start(states.device),
    )  # fmt: skip
    return True


def mamba1(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, output: Tensor, states: Tensor, rows: StateRows) -> bool:
    """Computes `mamba1_step`; False if a channel's state is larger than a program can hold."""
    _, channels, n_dim = states.shape
    if n_dim > MOST:
        return False
    block_n = power_of_2(n_dim)
    block_c = _block(channels, block_n)
    launch(
        mamba1_kernel, (rows.num_decode, blocks_of(channels, block_c)),
        x, dt, a, b, c, output, states, *_where(rows), *x.stride(), *dt.stride(), *a.stride(), *b.stride(), *c.stride(), output.stride(0),
        states.stride(0), C=channels, N=n_dim, HAS_ROWS=rows.decode_rows is not None, BLOCK_C=block_c, BLOCK_N=block_n,
        **early_start(states.device),
    )  # fmt: skip
    return True


def channels(decay: Tensor, x: Tensor, output: Tensor, maximum: bool, initial: float, states: Tensor, rows: StateRows) -> bool:
    """Computes `channel_scan_step`."""
    count = states.shape[1]
    block = _block(count, NUMBERS // SINGLE)
    launch(
        channel_kernel, (rows.num_decode, blocks_of(count, block)),
        decay, x, output, states, *_where(rows), *decay.stride(), *x.stride(), output.stride(0), states.stride(0), C=count,
        MAXIMUM=maximum, HAS_ROWS=rows.decode_rows is not None, BLOCK_C=block, **early_start(states.device),
    )  # fmt: skip
    return True


def _where(rows: StateRows) -> tuple[Any, Tensor]:
    return rows.decode_rows, rows.decode_slots


def _block(size: int, beside: int, numbers: int = NUMBERS) -> int:
    """How many elements of one dimension a program holds, given `beside` elements of the other."""
    return min(power_of_2(size), max(numbers // beside, 1))
