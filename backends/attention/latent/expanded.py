"""Computes keys and values from the rows in the pool, as many at a time as fit into bounded memory, and attends to them as the model does.

New prompts, which have nothing in the pool yet, are expanded and attended to several at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.batch.packed_ints import copy_to_device
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.latent import LatentCall

MOST_BYTES = 256 << 20  # of expanded keys and values, and of scores, at a time
FEWEST_TOKENS = 16


def most_tokens(call: LatentCall) -> int:
    """For how many tokens keys and values are computed at a time."""
    return MOST_BYTES // _token_bytes(call)


def attend_expanded(call: LatentCall, pool: KVPool, batch: Batch, request: int, rows: slice) -> None:
    """Writes `call.output[rows]` for one request, whose rows of this step are already in the pool."""
    spec, length = call.spec, batch.seq_lens_host[request]
    query = call.query[rows].transpose(0, 1)  # [heads, new, dim]
    if length <= most_tokens(call):
        keys, values = keys_and_values(call, pool, slots_of(batch, request, 0, length))
        visible = None if query.shape[1] == length else _visible(query, length, 0, length)
        result = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=visible, is_causal=visible is None, scale=spec.scale
        )
        call.output[rows] = result[0].transpose(0, 1)
        return
    wide = torch.promote_types(query.dtype, torch.float32)
    score_bytes = 2 * spec.num_q_heads * query.shape[1] * wide.itemsize
    step = max(FEWEST_TOKENS, MOST_BYTES // (_token_bytes(call) + score_bytes))
    call.output[rows] = _in_parts(call, pool, batch, request, query.to(wide), step).transpose(0, 1).to(call.output.dtype)


def _in_parts(call: LatentCall, pool: KVPool, batch: Batch, request: int, query: Tensor, step: int) -> Tensor:
    """[heads, new, value_dim]: the parts' results, each weighted by the sum of its exponentials."""
    length = batch.seq_lens_host[request]
    most = query.new_full((*query.shape[:2], 1), float("-inf"))
    total = torch.zeros_like(most)
    result = query.new_zeros((*query.shape[:2], call.spec.value_dim))
    for start in range(0, length, step):
        end = min(start + step, length)
        keys, values = (each.to(query.dtype) for each in keys_and_values(call, pool, slots_of(batch, request, start, end)))
        scores = (query @ keys.transpose(1, 2)) * call.spec.scale
        scores = scores.masked_fill(~_visible(query, length, start, end), float("-inf"))
        higher = torch.maximum(most, scores.amax(-1, keepdim=True))  # finite: the first part has token 0, which all see
        weights, keep = torch.exp(scores - higher), torch.exp(most - higher)
        most, total = higher, total * keep + weights.sum(-1, keepdim=True)
        result = result * keep + weights @ values
    return result / total


def keys_and_values(call: LatentCall, pool: KVPool, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [heads, tokens, key_dim + rotated] and values [heads, tokens, value_dim] of the tokens in `slots` [tokens]."""
    spec, tokens = call.spec, (call.spec.num_q_heads, slots.shape[0])
    keys = call.query.new_empty((*tokens, spec.key_dim + spec.rotated))
    values = call.query.new_empty((*tokens, spec.value_dim))
    expand(call, pool, slots, keys, values)
    return keys, values


def expand(call: LatentCall, pool: KVPool, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Writes what `keys_and_values` returns into tensors of any strides."""
    spec, heads = call.spec, call.spec.num_q_heads
    kept = pool.key(call.layer_id)[slots // pool.page_size, slots % pool.page_size, 0].to(keys.dtype)  # [tokens, rank + rotated]
    latent = kept[:, : spec.rank].expand(heads, -1, -1)
    plain, rotated = spec.split(keys)
    assert spec.keys is not None and spec.values is not None and call.weight_k is not None and call.weight_v is not None
    with torch.no_grad():
        torch.bmm(latent, spec.keys.of(call.weight_k, heads, spec.key_dim).transpose(1, 2), out=plain)
        torch.bmm(latent, spec.values.of(call.weight_v, heads, spec.value_dim).transpose(1, 2), out=values)
        rotated.copy_(kept[:, spec.rank :].expand(heads, -1, -1))


def slots_of(batch: Batch, request: int, start: int, end: int) -> Tensor:
    """The slots of a request's tokens from `start` up to `end`: [end - start] int64."""
    positions = torch.arange(start, end, device=batch.slots.device)
    pages = batch.page_table[request].to(torch.int64)[positions // batch.page_size]
    return pages * batch.page_size + positions % batch.page_size


def _token_bytes(call: LatentCall) -> int:
    spec = call.spec
    return spec.num_q_heads * (spec.key_dim + spec.rotated + spec.value_dim) * call.query.element_size()


def _visible(query: Tensor, length: int, start: int, end: int) -> Tensor:
    """[new, end - start]: which of the tokens `start` to `end - 1` each of the last ones of `length` sees."""
    new = torch.arange(length - query.shape[1], length, device=query.device)
    return torch.arange(start, end, device=query.device) <= new[:, None]


MOST_FILLED = 0.25  # most padding of a prompt, relative to the longest prompt in its group


@dataclass(frozen=True)
class FreshPrompts:
    """Prompts of similar lengths side by side, padded at the end to the longest. No token sees the padding, which comes after all tokens.

    Attributes:
        rows: [prompts, longest] int64, indices of the step's rows; padding repeats a prompt's first row.
        real: [tokens] int64, indices of those of the prompts * longest that are not padding; None: all.
    """

    rows: Tensor
    real: Tensor | None

    @classmethod
    def of(cls, parts: Sequence[slice], device: torch.device) -> FreshPrompts:
        """The prompts in these rows of a step."""
        starts = np.array([[part.start] for part in parts])
        lengths = np.array([[part.stop - part.start] for part in parts])
        columns = np.arange(lengths.max())
        real = columns < lengths
        rows = copy_to_device(starts + np.where(real, columns, 0), device)
        return cls(rows, None if real.all() else copy_to_device(np.flatnonzero(real), device))

    def attend(self, call: LatentCall, pool: KVPool, batch: Batch) -> None:
        """Writes the prompts' rows of `call.output`; their rows of this step are already in the pool."""
        spec, at = call.spec, self.rows.flatten()
        keys, values = (
            each.view(spec.num_q_heads, *self.rows.shape, -1).transpose(0, 1) for each in keys_and_values(call, pool, batch.slots[at])
        )
        query = call.query[self.rows].transpose(1, 2)  # [prompts, heads, longest, dim]
        result = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=spec.scale).transpose(1, 2).flatten(0, 1)
        if self.real is not None:
            at, result = at[self.real], result[self.real]
        call.output[at] = result


def of_like_lengths(parts: Sequence[slice], most_tokens: int) -> Iterator[list[slice]]:
    """Groups of new prompts that run together: at most `most_tokens` after padding, and little padding."""
    group: list[slice] = []
    longest = 0
    for part in sorted(parts, key=lambda each: each.start - each.stop):  # the longest first
        length = part.stop - part.start
        if group and (longest * (len(group) + 1) > most_tokens or longest - length > MOST_FILLED * longest):
            yield group
            group = []
        if not group:
            longest = length
        group.append(part)
    if group:
        yield group
