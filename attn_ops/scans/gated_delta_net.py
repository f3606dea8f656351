"""Gated DeltaNet: the gated delta rule with the gates before it and a gated norm of each head's output behind it.

g = -exp(a_log) softplus(a + dt_bias); beta = factor sigmoid(b); result = x / sqrt(mean(x^2) + eps) * (offset + scale) * act(z), where x is
what `gated_delta.py` gives. Paper: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.scans.gated_delta import gated_delta_step
from paged_attn.attn_ops.scans.short_conv import channels_in
from paged_attn.attn_ops.scans.state_rows import Extends, StateRows

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


class Columns(NamedTuple):
    """The columns of rows [T, N] that hold an operand, four numbers as in `channels_in`."""

    rows: Tensor
    columns: Sequence[int]

    def by_head(self, heads: int) -> Tensor:
        """[T, heads, -1] in float32"""
        (part,) = channels_in(self.rows, self.columns)
        return part.float().reshape(len(part), heads, -1)


class GatedDeltaNet(NamedTuple):
    """a and b hold a number for each of H heads, z a vector [V]; a_log and dt_bias [H]; scale [V]; `act` is a key of `GATES`."""

    a: Columns
    b: Columns
    z: Columns
    a_log: Tensor
    dt_bias: Tensor
    scale: Tensor
    factor: float
    eps: float
    offset: float
    act: str


def net_gates(net: GatedDeltaNet, g: Tensor, beta: Tensor) -> None:
    """Writes g and beta [T, H], float32."""
    heads = g.shape[1]
    g.copy_(decays(net.a.by_head(heads)[..., 0], net.a_log, net.dt_bias))
    beta.copy_(net.factor * net.b.by_head(heads)[..., 0].sigmoid())


def decays(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    return -a_log.to(a.dtype).exp() * F.softplus(a + dt_bias.to(a.dtype))


def net_norm(net: GatedDeltaNet, output: Tensor, extends: Extends) -> None:
    """The gated norm of the extending rows of output [T, H, V], in place."""
    z = net.z.by_head(output.shape[1])
    result = gated_norm(output[extends.rows].float(), z[extends.rows], net.scale, net.eps, net.offset, net.act)
    output[extends.rows] = result.to(output.dtype)


def gated_norm(x: Tensor, z: Tensor, scale: Tensor, eps: float, offset: float, act: str) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed * (offset + scale.to(x.dtype)) * GATES[act](z)


def gated_delta_net_step(
    query: Tensor, key: Tensor, value: Tensor, net: GatedDeltaNet, output: Tensor, normalise: bool, states: Tensor, rows: StateRows
) -> None:
    """The gates, `gated_delta_step` and the gated norm for the decoding rows."""
    g, beta = (torch.empty(value.shape[:2], device=value.device) for _ in range(2))
    net_gates(net, g, beta)
    result = torch.empty(value.shape, device=value.device)
    gated_delta_step(query, key, value, g, beta, result, normalise, states, rows)
    x, z = rows.decoding(result), rows.decoding(net.z.by_head(value.shape[1]))
    rows.put_decoded(output, gated_norm(x, z, net.scale, net.eps, net.offset, net.act))
