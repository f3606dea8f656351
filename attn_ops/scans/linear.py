"""Linear attention with a decay: S = exp(g) S + k^T v; output = q S, for every token, with S [K, V] of each head.

As `gated_delta.py` and `kda.py`, without the correction of what a key returns. A head has one decay, or one for each channel of its keys.
With `before` the query reads S as it is before it decays and learns the token, as in RWKV-6.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.scans.chunks import scan_chunks
from paged_attn.attn_ops.scans.gated_delta import CHUNK, decay_between
from paged_attn.attn_ops.scans.kda import scores_by_channel
from paged_attn.attn_ops.scans.state_rows import Extends, StateRows


def linear_attention_extend(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, output: Tensor, before: bool, states: Tensor, extends: Extends
) -> None:
    """query, key [T, H, K]; value, output [T, H, V]; g, logarithms of decays, [T, H] or [T, H, K]; states [slots, H, K, V]."""
    chunks = extends.chunks(CHUNK)
    q, k, v, decay = (chunks.gather(each) for each in (query, key, value, g))
    total = decay.cumsum(2)  # [N, H, size] or [N, H, size, K]; padding does not decay
    asking = q.roll(-1, 2) if before else q  # a token then reads what the one before it has left
    if g.dim() == 3:
        (scores,) = scores_by_channel((asking,), k, total)
    else:
        scores, total = asking @ k.transpose(-1, -2) * decay_between(total), total[..., None]
    read, last = total, total[..., -1:, :]
    if before:
        scores, read = (F.pad(each[..., :-1, :], (0, 0, 1, 0)) for each in (scores, total))
    result, kept = scan_chunks(
        chunks, extends.before(states), q * read.exp(), k * (last - total).exp(), v, scores, last.exp().transpose(-1, -2)
    )
    chunks.scatter(result.transpose(1, 2), output)
    states[extends.targets] = kept


def linear_attention_step(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, output: Tensor, before: bool, states: Tensor, rows: StateRows
) -> None:
    """Like `linear_attention_extend`, for the decoding rows."""
    q, k, v, decay = (rows.decoding(each).float() for each in (query, key, value, g))
    then = states[rows.decode_slots].float()
    now = then * decay.exp().view(*decay.shape[:2], -1, 1) + k[..., None] * v[..., None, :]
    rows.put_decoded(output, ((then if before else now) * q[..., None]).sum(-2))
    states[rows.decode_slots] = now.to(states.dtype)
