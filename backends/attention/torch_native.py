"""Paged, ragged attention in plain PyTorch: runs everywhere, has no dependencies, and decodes without a loop over requests.

Decode gathers, per step, the slots that each request's one query may see into a rectangle [requests, longest]; an entry
past a request's end repeats its last slot, so that no unused page is ever read, and is masked. Extending requests gather
their own keys one request at a time.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.batch.packed_ints import copy_to_device
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionBackend, AttentionCall
from paged_attn.backends.attention.capabilities import Capabilities, Feature
from paged_attn.backends.needs import UP_TO_FLOAT64

MOST_MASK = 1 << 26  # elements of a mask that is expanded for every head
MaskKey = tuple[bool, int | None, int | None, int | None, str]


@dataclass
class Gather:
    """Where a set of queries finds its keys: their pages and offsets [R, keys], positions, visibility [R, 1, queries, keys], and distances
    j - i."""

    pages: Tensor
    offsets: Tensor
    positions: Tensor
    visible: Tensor
    distance: Tensor


@dataclass
class Plan:
    batch: Batch
    pool: KVPool
    slot_pages: Tensor
    slot_offsets: Tensor
    extending: list[int]
    decode_requests: Tensor
    decode_rows: Tensor
    decode_lens_host: list[int]
    decode: dict[MaskKey, Gather] = field(default_factory=dict)
    extend: dict[tuple[int, MaskKey], Gather] = field(default_factory=dict)


class TorchNativeBackend(AttentionBackend):
    name = "torch_native"
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=UP_TO_FLOAT64,
        kv_dtypes=UP_TO_FLOAT64,
        features=frozenset(
            {Feature.WINDOW, Feature.CHUNK, Feature.DUAL_CHUNK, Feature.SOFTCAP, Feature.SINKS, Feature.ALIBI, Feature.POSITION_BIAS,
             Feature.BIDIRECTIONAL, Feature.WINDOW_AHEAD, Feature.LSE, Feature.MLA, Feature.UNEQUAL_DIMS}
        ),
        note="PyTorch operations only",
    )  # fmt: skip

    def plan(self, batch: Batch, pool: KVPool) -> Plan:
        real = batch.slots[: batch.num_tokens]
        seq, new = batch.seq_lens_host, batch.query_lens_host
        decoding = [r for r in range(batch.num_requests) if new[r] == 1 and seq[r] > 1]
        chosen = set(decoding)
        requests = copy_to_device(np.array(decoding, dtype=np.int64), batch.slots.device)
        return Plan(
            batch=batch,
            pool=pool,
            slot_pages=real // batch.page_size,
            slot_offsets=real % batch.page_size,
            extending=[r for r in range(batch.num_requests) if r not in chosen],
            decode_requests=requests,
            decode_rows=batch.query_start[:-1].to(torch.int64)[requests],
            decode_lens_host=[seq[r] for r in decoding],
        )

    def write_kv(self, plan: Plan, call: AttentionCall) -> None:
        count, index = plan.batch.num_tokens, (plan.slot_pages, plan.slot_offsets)
        plan.pool.key(call.layer_id).index_put_(index, call.key[:count].to(plan.pool.dtype))
        plan.pool.value(call.layer_id).index_put_(index, call.value[:count].to(plan.pool.dtype))

    def forward_decode(self, plan: Plan, call: AttentionCall) -> None:
        if not plan.decode_lens_host:
            return
        gather, rows = _decode_gather(plan, call.spec), plan.decode_rows
        keys, values = _gathered(plan, call, gather)  # [R, keys, kv_heads, dim]
        result, lse = _attend(call.query[rows][:, None], keys, values, gather, call)
        call.output[rows] = result[:, 0]
        if call.lse_out is not None:
            call.lse_out[rows] = lse[:, 0]

    def forward_extend(self, plan: Plan, call: AttentionCall) -> None:
        self.forward_decode(plan, call)  # requests of a mixed batch with one new token
        starts = [0, *itertools.accumulate(plan.batch.query_lens_host)]
        for request in plan.extending:
            gather, rows = _extend_gather(plan, request, call.spec), slice(starts[request], starts[request + 1])
            keys, values = _gathered(plan, call, gather)
            # Contiguous, since on a GPU PyTorch's kernels read past rows that start at odd addresses.
            result, lse = _attend(call.query[None, rows].contiguous(), keys, values, gather, call)
            call.output[rows] = result[0]
            if call.lse_out is not None:
                call.lse_out[rows] = lse[0]


def _gathered(plan: Plan, call: AttentionCall, gather: Gather) -> tuple[Tensor, Tensor]:
    keys = plan.pool.key(call.layer_id)[gather.pages, gather.offsets]
    values = plan.pool.value(call.layer_id)[gather.pages, gather.offsets]
    return keys.to(call.query.dtype), values.to(call.query.dtype)


def _first_visible(position: Tensor, spec: AttentionSpec) -> Tensor:
    first = torch.zeros_like(position)
    if spec.sliding_window is not None:
        first = torch.maximum(first, position - (spec.sliding_window - 1))
    if spec.chunk is not None and spec.chunk_part != "inter":
        chunk = position // spec.chunk - int(spec.chunk_part == "successive")
        first = torch.maximum(first, chunk * spec.chunk)
    return first


def _last_visible(position: Tensor, spec: AttentionSpec) -> Tensor:
    """The last position that a causal layer sees; negative if nothing is visible."""
    if spec.chunk is None or spec.chunk_part == "intra":
        return position
    chunk = position // spec.chunk - int(spec.chunk_part == "inter")
    return chunk * spec.chunk - 1


def _longest_view(length: int, spec: AttentionSpec) -> int:
    """How many keys the last of `length` tokens sees."""
    if spec.sliding_window is not None:
        length = min(length, spec.sliding_window)
    return min(length, spec.chunk) if spec.chunk is not None and spec.chunk_part != "inter" else length


def _mask_key(spec: AttentionSpec) -> MaskKey:
    return spec.causal, spec.sliding_window, spec.window_ahead, spec.chunk, spec.chunk_part


def _decode_gather(plan: Plan, spec: AttentionSpec) -> Gather:
    cached = plan.decode.get(mask := _mask_key(spec))
    if cached is None:
        last = plan.batch.seq_lens.to(torch.int64)[plan.decode_requests] - 1
        longest = max(_longest_view(length, spec) for length in plan.decode_lens_host)
        seen = _first_visible(last, spec)[:, None] + torch.arange(longest, device=last.device)
        inside = torch.minimum(seen, last[:, None])
        pages = torch.gather(plan.batch.page_table.to(torch.int64)[plan.decode_requests], 1, inside // plan.batch.page_size)
        cached = plan.decode[mask] = Gather(
            pages, inside % plan.batch.page_size, inside[:, None, None],
            (seen <= _last_visible(last, spec)[:, None])[:, None, None],
            (seen - last[:, None])[:, None, None],
        )  # fmt: skip
    return cached


def _extend_gather(plan: Plan, request: int, spec: AttentionSpec) -> Gather:
    cached = plan.extend.get(key := (request, _mask_key(spec)))
    if cached is None:
        device = plan.batch.slots.device
        end = plan.batch.seq_lens_host[request]
        start = end - plan.batch.query_lens_host[request]
        position = torch.arange(start, end, device=device)[:, None]
        begin = int(_first_visible(torch.tensor(start), spec))  # earlier pages may be freed
        seen = torch.arange(begin, end, device=device)
        visible = seen >= _first_visible(position, spec)
        if spec.causal:
            visible = visible & (seen <= _last_visible(position, spec))
        elif spec.chunk is not None:
            visible = visible & (seen < (position // spec.chunk + 1) * spec.chunk)
        if spec.window_ahead is not None:
            visible = visible & (seen < position + spec.window_ahead)
        pages = plan.batch.page_table[request].to(torch.int64)[seen // plan.batch.page_size]
        cached = plan.extend[key] = Gather(
            pages[None], (seen % plan.batch.page_size)[None], seen[None, None, None], visible[None, None], (seen - position)[None, None]
        )
    return cached


def _attend(query: Tensor, keys: Tensor, values: Tensor, gather: Gather, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """query [R, Q, q_heads, dim], keys and values [R, K, kv_heads, dim].

    Returns the output [R, Q, q_heads, dim] and the log-sum-exp [R, Q, q_heads] (any tensor if it is not wanted).
    """
    spec, sinks = call.spec, call.sinks
    q, k, v = query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
    if spec.softcap is None and spec.alibi_slopes is None and call.bias is None and sinks is None and call.lse_out is None:
        if spec.num_kv_heads == 1 and gather.visible.numel() * spec.group_size <= MOST_MASK:
            return _attend_to_one_head(q, k, v, gather, spec).transpose(1, 2), query
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=gather.visible, scale=spec.scale, enable_gqa=spec.group_size > 1)
        return result.transpose(1, 2), result
    k, v = (t.repeat_interleave(spec.group_size, dim=1) for t in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)  # in float16, q.k may overflow before the scale
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.alibi_slopes is not None:
        scores = scores + scores.new_tensor(spec.alibi_slopes)[:, None, None] * gather.distance
    if call.bias is not None:
        scores = scores + _bias(call, gather)
    scores = scores.masked_fill(~gather.visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(wide)[None, :, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])[..., : keys.shape[1]]
    return (weights.to(v.dtype) @ v).transpose(1, 2), lse.float().transpose(1, 2)


def _attend_to_one_head(q: Tensor, k: Tensor, v: Tensor, gather: Gather, spec: AttentionSpec) -> Tensor:
    """[R, q_heads, Q, dim]: the queries of all heads become rows of one head, so keys and values are not repeated."""
    heads, count = q.shape[1:3]
    visible = gather.visible.expand(-1, heads, -1, -1).flatten(1, 2)[:, None]
    result = F.scaled_dot_product_attention(q.flatten(1, 2)[:, None], k, v, attn_mask=visible, scale=spec.scale)
    by_head: Tensor = result[:, 0].unflatten(1, (heads, count))
    return by_head


def _bias(call: AttentionCall, gather: Gather) -> Tensor:
    """[R, q_heads, Q or 1, K], read from the layer's table [q_heads, N]."""
    assert call.bias is not None
    bias_columns = gather.positions if call.spec.bias_index == "key" else -gather.distance
    return call.bias[:, bias_columns[:, 0].clamp(0, call.bias.shape[1] - 1)].transpose(0, 1)
