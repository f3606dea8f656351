"""Launches the kernels of Gated DeltaNet."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paged_attn.attn_ops.scans.gated_delta import EPS
from paged_attn.attn_ops.scans.gated_delta_net import Columns, GatedDeltaNet
from paged_attn.attn_ops.scans.state_rows import Extends, StateRows
from paged_attn.backends.compiling.compile_ahead import launch
from paged_attn.backends.fast_launch import keyed_launch
from paged_attn.backends.machine import blocks_of, early_start, power_of_2
from paged_attn.backends.scans.triton import net_kernel

MOST = 128 * 128  # elements of a head's state that a program holds
PER_WARP = 4096  # elements of a state
TOKENS = 16  # of a program that computes gates
NORMED = 4096  # elements of a program that normalises


def step(
    query: Tensor, key: Tensor, value: Tensor, net: GatedDeltaNet, output: Tensor, normalise: bool, states: Tensor, rows: StateRows
) -> bool:
    """Computes `gated_delta_net_step`; False if a head's state is larger than a program can hold."""
    _, heads, k_dim, v_dim = states.shape
    block_k, block_v = power_of_2(k_dim), power_of_2(v_dim)
    if block_k * block_v > MOST or not _in_order([net.a, net.b, net.z], net.a_log, net.dt_bias, net.scale):
        return False
    launch(
        net_kernel.net_step, (rows.num_decode, heads),
        query, key, value, net.a.rows, net.b.rows, net.z.rows, net.a_log, net.dt_bias, net.scale, output, states, rows.decode_rows,
        rows.decode_slots, *query.stride(), *key.stride(), *value.stride(), *(each.rows.stride(0) for each in (net.a, net.b, net.z)),
        output.stride(0), states.stride(0), net.factor, net.eps, net.offset, k_dim**-0.5, EPS, A=tuple(net.a.columns),
        B=tuple(net.b.columns), Z=tuple(net.z.columns), REPEATS=heads // key.shape[1], K=k_dim, V=v_dim, NORMALISE=normalise,
        SILU=net.act == "silu", HAS_ROWS=rows.decode_rows is not None, BLOCK_K=block_k, BLOCK_V=block_v,
        num_warps=max(block_k * block_v // PER_WARP, 1), **early_start(states.device),
    )  # fmt: skip
    return True


def gates(net: GatedDeltaNet, g: Tensor, beta: Tensor) -> bool:
    """Computes `net_gates`."""
    tokens, heads = g.shape
    if not _in_order([net.a, net.b], net.a_log, net.dt_bias):
        return False
    keyed_launch(
        net_kernel.net_gates, (blocks_of(tokens, TOKENS), 1),
        net.a.rows, net.b.rows, net.a_log, net.dt_bias, g, beta, tokens, net.a.rows.stride(0), net.b.rows.stride(0), net.factor,
        A=tuple(net.a.columns), B=tuple(net.b.columns), HEADS=heads, TOKENS=TOKENS, BLOCK_H=power_of_2(heads),
    )  # fmt: skip
    return True


def norm(net: GatedDeltaNet, output: Tensor, extends: Extends) -> bool:
    """Computes `net_norm`."""
    _, heads, v_dim = output.shape
    rows, block_v = extends.rows, power_of_2(v_dim)
    if not _in_order([net.z], net.scale) or block_v > NORMED:
        return False
    block_h = min(NORMED // block_v, power_of_2(heads))
    keyed_launch(
        net_kernel.net_norm, (len(rows), blocks_of(heads, block_h)),
        net.z.rows, net.scale, output, rows, net.z.rows.stride(0), output.stride(0), net.eps, net.offset, Z=tuple(net.z.columns), V=v_dim,
        HEADS=heads, SILU=net.act == "silu", BLOCK_H=block_h, BLOCK_V=block_v,
    )  # fmt: skip
    return True


def _in_order(operands: Sequence[Columns], *parameters: Tensor) -> bool:
    return all(each.stride(-1) == 1 for each in (*(operand.rows for operand in operands), *parameters))
