"""Attention in float32 on any device, a request at a time, for checking what is timed. It shares no code with any backend."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.timing.inputs import Inputs

SCORE_BYTES = 1 << 30


def row_attention(inputs: Inputs, layer: int) -> Tensor:
    """What `layer` must give: [T, q_heads, v_dim] float32, from the K and V in the pool."""
    batch, spec, results, row = inputs.batch, inputs.pool.layers[layer], [], 0
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # not TF32
    try:
        for request, (new, length) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
            pages = batch.page_table[request, : -(-length // batch.page_size)].long()
            # [kv_heads, length, dim]
            keys, values = (pool[pages].flatten(0, 1)[:length].transpose(0, 1).float()
                            for pool in (inputs.pool.key(layer), inputs.pool.value(layer)))  # fmt: skip
            query = inputs.query[layer, row : row + new]
            step = max(1, SCORE_BYTES // (4 * 4 * spec.num_q_heads * length))  # some four tensors of scores
            for start in range(0, new, step):
                some = query[start : start + step].float()
                results.append(_attention(spec, some, keys, values, length - new + start, inputs.sinks))
            row += new
    finally:
        torch.set_float32_matmul_precision(precision)
    return torch.cat(results)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error of a row [.., dim], over the row's norm (at least a tenth of the rows' mean); NaN where anything is NaN."""
    norm = expected.norm(dim=-1)
    return float(((actual.float() - expected).norm(dim=-1) / norm.clamp(min=norm.mean() / 10)).max())


def _attention(spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, first: int, sinks: Tensor | None) -> Tensor:
    """query [Q, q_heads, dim] at positions first, first + 1, ...; keys and values [kv_heads, K, dim]."""
    count, heads = query.shape[0], (spec.num_kv_heads, spec.group_size)
    grouped = query.permute(1, 0, 2).reshape(heads[0], heads[1] * count, -1)
    scores = (grouped @ keys.transpose(1, 2)).view(*heads, count, -1) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    i = torch.arange(first, first + count, device=query.device)[:, None]
    j = torch.arange(keys.shape[1], device=query.device)
    if spec.alibi_slopes is not None:
        scores = scores + scores.new_tensor(spec.alibi_slopes).view(*heads, 1, 1) * (j - i)
    hidden = torch.zeros_like(i + j, dtype=torch.bool)
    if spec.causal:
        hidden = hidden | (j > i)
    if spec.sliding_window is not None:
        hidden = hidden | (j <= i - spec.sliding_window)
    if spec.window_ahead is not None:
        hidden = hidden | (j >= i + spec.window_ahead)
    if spec.chunk is not None:
        hidden = hidden | (i // spec.chunk != j // spec.chunk)
    scores = scores.masked_fill(hidden, float("-inf"))
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float().view(*heads, 1, 1))
    weights = torch.exp(scores - total).view(heads[0], heads[1] * count, -1)
    return (weights @ values).view(*heads, count, -1).flatten(0, 1).transpose(0, 1)
