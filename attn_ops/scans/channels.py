"""A scan of single numbers: S = decay S + x, or the running maximum S = max(S + decay, x), for every token and channel.

What a token reads is the state before it, so that a layer may compute anything from that. Maxima keep sums of exponentials in range, as in
RWKV-4 and xLSTM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.scans.state_rows import Extends, StateRows

CHUNK = 32  # tokens that are combined at once


def channel_scan_extend(decay: Tensor, x: Tensor, output: Tensor, maximum: bool, initial: float, states: Tensor, extends: Extends) -> None:
    """decay, x, output [T, channels]; states [slots, channels], of fresh requests `initial`.

    In each chunk an inclusive scan of pairs (decay, addend) in log2(CHUNK) rounds, all requests' chunks at once.
    """
    chunks = extends.chunks(CHUNK)
    kept = states.new_empty(chunks.num_segments, *states.shape[1:])
    now = extends.before(states, initial)[chunks.order].float()
    result = torch.empty(*chunks.rows.shape, x.shape[1], dtype=torch.float32, device=x.device)
    keep, nothing = (0.0, float("-inf")) if maximum else (1.0, 0.0)  # padding leaves the state as it is
    for index, wave in enumerate(chunks.waves):
        rows, real = chunks.rows[wave], chunks.real[wave][..., None]
        passed, added = torch.where(real, decay[rows].float(), keep), torch.where(real, x[rows].float(), nothing)
        added[:, 0] = after(now[: len(wave)], passed[:, 0], added[:, 0], maximum)
        reach = 1
        while reach < CHUNK:
            earlier, later = (passed[:, :-reach], added[:, :-reach]), (passed[:, reach:], added[:, reach:])
            added = torch.cat([added[:, :reach], after(earlier[1], *later, maximum)], 1)
            both = earlier[0] + later[0] if maximum else earlier[0] * later[0]
            passed = torch.cat([passed[:, :reach], both], 1)
            reach *= 2
        result[wave] = torch.cat([now[: len(wave), None], added[:, :-1]], 1)
        now[: len(wave)] = added[:, -1]
        chunks.keep(index, now, kept)
    chunks.scatter(result, output)
    states[extends.targets] = kept


def channel_scan_step(decay: Tensor, x: Tensor, output: Tensor, maximum: bool, initial: float, states: Tensor, rows: StateRows) -> None:
    """Like `channel_scan_extend`, for the decoding rows, which all have a state."""
    passed, added = (rows.decoding(each).float() for each in (decay, x))
    then = states[rows.decode_slots].float()
    rows.put_decoded(output, then)
    states[rows.decode_slots] = after(then, passed, added, maximum).to(states.dtype)


def after(state: Tensor, decay: Tensor, x: Tensor, maximum: bool) -> Tensor:
    """The state after a token."""
    return torch.maximum(state + decay, x) if maximum else state * decay + x
