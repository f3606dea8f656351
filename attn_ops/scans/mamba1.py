"""The selective scan of Mamba-1: S = exp(dt A) S + dt x B^T; output = S C, for every token, with S and A [channels, N]."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.scans.state_rows import Extends, StateRows

CHUNK = 32  # tokens whose states are in memory at the same time


def mamba1_extend(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, output: Tensor, states: Tensor, extends: Extends) -> None:
    """x, dt, output [T, channels]; a [channels, N]; b, c [T, N]; states [slots, channels, N].

    In each chunk an inclusive scan of pairs (decay, addend) in log2(CHUNK) rounds, all requests' chunks at once.
    """
    chunks = extends.chunks(CHUNK)
    kept = states.new_empty(chunks.num_segments, *states.shape[1:])
    now = extends.before(states)[chunks.order].float()
    result = torch.empty(*chunks.rows.shape, x.shape[1], dtype=torch.float32, device=x.device)
    for index, wave in enumerate(chunks.waves):
        rows, real = chunks.rows[wave], chunks.real[wave][..., None]
        step = torch.where(real, dt[rows].float(), 0.0)
        decay = (step[..., None] * a.float()).exp()  # [requests, CHUNK, channels, N]; padding keeps the state
        added = (step * torch.where(real, x[rows].float(), 0.0))[..., None] * torch.where(real, b[rows].float(), 0.0)[:, :, None]
        added[:, 0] += decay[:, 0] * now[: len(wave)]
        reach = 1
        while reach < CHUNK:
            added = torch.cat([added[:, :reach], added[:, reach:] + decay[:, reach:] * added[:, :-reach]], 1)
            decay = torch.cat([decay[:, :reach], decay[:, reach:] * decay[:, :-reach]], 1)
            reach *= 2
        now[: len(wave)] = added[:, -1]
        chunks.keep(index, now, kept)
        result[wave] = (added @ torch.where(real, c[rows].float(), 0.0)[..., None])[..., 0]
    chunks.scatter(result, output)
    states[extends.targets] = kept


def mamba1_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, output: Tensor, states: Tensor, rows: StateRows) -> None:
    """Like `mamba1_extend`, for the decoding rows."""
    new, step, key, query = (rows.decoding(each).float() for each in (x, dt, b, c))
    now = states[rows.decode_slots].float() * (step[..., None] * a.float()).exp() + (step * new)[..., None] * key[:, None]
    rows.put_decoded(output, (now @ query[..., None])[..., 0])
    states[rows.decode_slots] = now.to(states.dtype)
