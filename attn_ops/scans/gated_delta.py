"""The gated delta rule: S decays, then what it returns for a key is moved towards the value, and a query reads it.

S = exp(g) S; S = S + k (beta (v - S^T k))^T; output = S^T q / sqrt(K), for every token, with S [K, V] of each head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.scans.chunks import scan_chunks
from paged_attn.attn_ops.scans.state_rows import Extends, StateRows

CHUNK = 64
EPS = 1e-6


def gated_delta_extend(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, output: Tensor, normalise: bool, states: Tensor, extends: Extends
) -> None:
    """query, key [T, key heads, K]; value, output [T, H, V]; g, beta [T, H]; states [slots, H, K, V]."""
    chunks = extends.chunks(CHUNK)
    q, k, v, decay, learned = (chunks.gather(each) for each in (query, key, value, g, beta))
    q, k = prepared(q, k, value.shape[1], normalise)
    total = decay.cumsum(-1)  # [N, H, size]; padding does not decay
    pairs = decay_between(total)
    learned = learned[..., None]
    system = (k * learned) @ k.transpose(-1, -2) * pairs  # unit lower triangular; its diagonal is not read
    right = torch.cat([v * learned, k * learned * total.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    last = total[..., -1:]
    result, kept = scan_chunks(
        chunks, extends.before(states), q * total.exp()[..., None], k * (last - total).exp()[..., None], new,
        q @ k.transpose(-1, -2) * pairs, last.exp()[..., None], reads,
    )  # fmt: skip
    chunks.scatter(result.transpose(1, 2), output)
    states[extends.targets] = kept


def gated_delta_step(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, output: Tensor, normalise: bool, states: Tensor, rows: StateRows
) -> None:
    """Like `gated_delta_extend`, for the decoding rows; g may also be [T, H, K], as for `kda_extend`."""
    q, k, v, decay, learned = (rows.decoding(each).float() for each in (query, key, value, g, beta))
    q, k = prepared(q, k, value.shape[1], normalise)
    now = states[rows.decode_slots].float() * decay.exp().view(*decay.shape[:2], -1, 1)
    given = (v - (now * k[..., None]).sum(-2)) * learned[..., None]
    now = now + k[..., None] * given[..., None, :]
    rows.put_decoded(output, (now * q[..., None]).sum(-2))
    states[rows.decode_slots] = now.to(states.dtype)


def prepared(q: Tensor, k: Tensor, heads: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Query and key, normalized if asked for, the query scaled, and each head repeated for the value heads that it serves."""
    if normalise:
        q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + EPS) for each in (q, k))
    q = q * q.shape[-1] ** -0.5
    if (repeats := heads // q.shape[1]) > 1:
        q, k = q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
    return q, k


def decay_between(total: Tensor) -> Tensor:
    """[.., i, j]: the decay from token j to token i, zero if j is later; total [.., size] are summed logarithms."""
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
