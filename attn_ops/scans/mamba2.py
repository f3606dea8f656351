"""The scan of Mamba-2: S = exp(dt A) S + dt x B^T; output = S C, for every token, with S [P, N] and one A per head."""

from __future__ import annotations

from torch import Tensor

from paged_attn.attn_ops.scans.chunks import scan_chunks
from paged_attn.attn_ops.scans.gated_delta import decay_between
from paged_attn.attn_ops.scans.state_rows import Extends, StateRows

CHUNK = 64


def mamba2_extend(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, output: Tensor, low: float, high: float, states: Tensor, extends: Extends
) -> None:
    """x, output [T, H, P]; dt [T, H], clamped to [low, high]; a [H]; b, c [T, groups, N]; states [slots, H, P, N]."""
    chunks, repeats = extends.chunks(CHUNK), x.shape[1] // b.shape[1]
    step, new = chunks.gather(dt.clamp(low, high)), chunks.gather(x)
    keys, queries = (chunks.gather(each).repeat_interleave(repeats, 1) for each in (b, c))
    total = (step * a.float()[:, None]).cumsum(-1)  # [N, H, size]; padding does not decay
    last = total[..., -1:]
    result, kept = scan_chunks(
        chunks, extends.before(states).transpose(-1, -2), queries * total.exp()[..., None], keys * (last - total).exp()[..., None],
        new * step[..., None], queries @ keys.transpose(-1, -2) * decay_between(total), last.exp()[..., None],
    )  # fmt: skip
    chunks.scatter(result.transpose(1, 2), output)
    states[extends.targets] = kept.transpose(-1, -2)


def mamba2_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, output: Tensor, states: Tensor, rows: StateRows) -> None:
    """Like `mamba2_extend`, for the decoding rows, whose dt is not clamped."""
    repeats = x.shape[1] // b.shape[1]
    new, step, key, query = (rows.decoding(each).float() for each in (x, dt, b, c))
    key, query = (each.repeat_interleave(repeats, 1)[:, :, None] for each in (key, query))  # [D, H, 1, N]
    now = states[rows.decode_slots].float() * (step * a.float()).exp()[..., None, None] + (new * step[..., None])[..., None] * key
    rows.put_decoded(output, (now * query).sum(-1))
    states[rows.decode_slots] = now.to(states.dtype)
