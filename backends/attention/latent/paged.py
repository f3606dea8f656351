"""Computes keys and values from the rows into a separate pool, for backends whose kernels attend to them faster than PyTorch's.

That pool has pages of one token, so that contexts of any length lie end to end and the products write keys and values in place.
A context too long to be expanded at once is attended to part by part, and the results are merged by their log-sum-exps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, mode_of
from paged_attn.attn_ops.batch.packed_ints import copy_to_device
from paged_attn.attn_ops.batch.part import part_of
from paged_attn.attn_ops.context import Backend
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.latent import LatentCall
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.latent.expanded import expand, slots_of


@dataclass(frozen=True)
class PagedExpansion:
    """Requests whose contexts are expanded together, new prompts or not, and the backend's plan for them.

    Attributes:
        batch: these requests; its pages are the tokens of `pool`, from page 1 on.
        pool: expanded keys and values, as layer 0; a step's layers use it one after the other.
        rows: indices of the batch's rows in the step; a slice if the requests are adjacent.
        slots: [tokens of all contexts] int64, their slots in the pool of latents.
    """

    batch: Batch
    plan: Any
    pool: KVPool
    rows: slice | Tensor
    slots: Tensor

    @classmethod
    def of(cls, backend: Backend, batch: Batch, requests: Sequence[int], pool: KVPool) -> PagedExpansion:
        """`requests`: ascending indices of requests of a step; `pool` has page 0 and a page for each of their tokens."""
        part, at = part_of(batch, requests)
        device, lengths, size = batch.slots.device, part.seq_lens.to(torch.int64), batch.page_size
        ends = lengths.cumsum(0)
        token = torch.arange(sum(part.seq_lens_host), device=device)
        owner = torch.bucketize(token, ends, right=True)
        position = token - (ends - lengths)[owner]
        slots = part.page_table[owner, position // size].to(torch.int64) * size + position % size
        table = (ends - lengths + 1)[:, None] + torch.arange(max(part.seq_lens_host), device=device)
        on_tokens = replace(part, page_size=1, page_table=table.to(torch.int32), page_table_host=None)
        plan = backend.plan(on_tokens, pool)
        backend.plan_in_graph(plan)
        return cls(on_tokens, plan, pool, _rows(batch, requests, at), slots)

    def attend(self, backend: Backend, call: LatentCall, latents: KVPool) -> None:
        """Write the requests' rows of `call.output`; their rows of this step are in the pool of latents already."""
        expand_into(self.pool, call, latents, self.slots)
        query, neighbours = call.query[self.rows], isinstance(self.rows, slice)
        output = call.output[self.rows] if neighbours else call.output.new_empty((*query.shape[:2], call.spec.value_dim))
        no_value = query[..., : call.spec.value_dim]  # placeholder of the right shape: keys and values are in the pool
        backend.forward(self.plan, 0, self.pool.layers[0], query, query, no_value, output, save_kv_cache=False)
        if not neighbours:
            call.output[self.rows] = output


def expand_into(pool: KVPool, call: LatentCall, latents: KVPool, slots: Tensor) -> None:
    """Expands the tokens in `slots` of `latents` into the pages from 1 on of a pool with pages of one token."""
    tokens = slice(1, 1 + slots.shape[0])
    keys, values = (each[tokens, 0].transpose(0, 1) for each in (pool.key(0), pool.value(0)))
    expand(call, latents, slots, keys, values)


def groups_of(lengths: Sequence[int], requests: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Requests in their order, in groups of at most `most_tokens` tokens; no request has more by itself."""
    group: list[int] = []
    tokens = 0
    for request in requests:
        if tokens + lengths[request] > most_tokens:
            yield group
            group, tokens = [], 0
        group.append(request)
        tokens += lengths[request]
    if group:
        yield group


def _rows(batch: Batch, requests: Sequence[int], at: Tensor) -> slice | Tensor:
    if requests[-1] - requests[0] + 1 > len(requests):
        return at
    starts = list(itertools.accumulate(batch.query_lens_host, initial=0))
    return slice(starts[requests[0]], starts[requests[-1] + 1])


CAUSAL, WHOLE = 0, 1  # indices of two layers over the same keys and values


@dataclass(frozen=True)
class _Piece:
    """Adjacent new tokens, and how they see a part: tokens in it up to themselves, tokens after it all of it."""

    rows: slice
    layer: int
    batch: Batch
    plan: Any


@dataclass(frozen=True)
class PagedParts:
    """One request. `rows`: its rows of the step; `parts`: (slots of the part's tokens, pieces that see it)."""

    pool: KVPool
    rows: slice
    parts: tuple[tuple[Tensor, tuple[_Piece, ...]], ...]

    @classmethod
    def of(cls, backend: Backend, batch: Batch, request: int, pool: KVPool, most_tokens: int) -> PagedParts:
        """`pool` has page 0 and `most_tokens` further pages."""
        whole, _ = part_of(batch, [request])
        first, new, length = sum(batch.query_lens_host[:request]), batch.query_lens_host[request], batch.seq_lens_host[request]
        parts = []
        for start in range(0, length, most_tokens):
            end = min(start + most_tokens, length)
            inside = [(CAUSAL, max(start, length - new), end)] if end > length - new else []
            # No more at once than the part has tokens, since the backend takes them as its last ones.
            behind = [(WHOLE, low, min(low + end - start, length)) for low in range(max(end, length - new), length, end - start)]
            pieces = (_piece(backend, whole, pool, end - start, *piece) for piece in inside + behind)
            parts.append((slots_of(batch, request, start, end), tuple(pieces)))
        return cls(pool, slice(first, first + new), tuple(parts))

    def attend(self, backend: Backend, call: LatentCall, latents: KVPool) -> None:
        query, width = call.query[self.rows], call.spec.value_dim
        sums = query.new_zeros((*query.shape[:2], width), dtype=torch.float32)
        totals = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
        for slots, pieces in self.parts:
            expand_into(self.pool, call, latents, slots)
            for piece in pieces:
                mine = query[piece.rows]
                output, lse = mine.new_empty((*mine.shape[:2], width)), totals.new_empty(mine.shape[:2])
                spec, no_value = self.pool.layers[piece.layer], mine[..., :width]
                backend.forward(piece.plan, piece.layer, spec, mine, mine, no_value, output, save_kv_cache=False, lse_out=lse)
                before = totals[piece.rows]
                after = torch.logaddexp(before, lse)
                sums[piece.rows] = sums[piece.rows] * (before - after).exp()[..., None] + output * (lse - after).exp()[..., None]
                totals[piece.rows] = after
        call.output[self.rows] = sums.to(call.output.dtype)


def _piece(backend: Backend, whole: Batch, pool: KVPool, tokens: int, layer: int, low: int, high: int) -> _Piece:
    """The piece with the request's new tokens at positions `low` to `high - 1`, over a part of `tokens` tokens."""
    cached, new, device = whole.seq_lens_host[0] - whole.query_lens_host[0], high - low, whole.slots.device
    rows = slice(low - cached, high - cached)
    lengths = copy_to_device(np.array([tokens, new, 0, new], dtype=np.int32), device)
    batch = replace(
        whole, mode=mode_of(np.array([tokens - new]), np.array([new])), page_size=1, num_tokens=new,
        input_ids=whole.input_ids[rows], positions=whole.positions[rows], slots=whole.slots[rows],
        page_table=torch.arange(1, tokens + 1, dtype=torch.int32, device=device)[None], page_table_host=None,
        seq_lens=lengths[:1], query_lens=lengths[1:2], query_start=lengths[2:], seq_lens_host=(tokens,), query_lens_host=(new,),
    )  # fmt: skip
    plan = backend.plan(batch, pool)
    backend.plan_in_graph(plan)
    return _Piece(rows, layer, batch, plan)


def paged_expansions(
    backend: Backend, spec: AttentionSpec, dtype: torch.dtype, batch: Batch, requests: Sequence[int], most_tokens: int
) -> tuple[PagedExpansion | PagedParts, ...]:
    """Expansions of all these requests: those with at most `most_tokens` in groups, longer ones separately."""
    lengths = batch.seq_lens_host
    groups = list(groups_of(lengths, [r for r in requests if lengths[r] <= most_tokens], most_tokens))
    longer = [r for r in requests if lengths[r] > most_tokens]
    tokens = most_tokens if longer else max(sum(lengths[r] for r in group) for group in groups)
    layers = [spec, replace(spec, causal=False)] if longer else [spec]  # kv_layer is 0 for both
    pool = KVPool(layers, 1 + tokens, 1, dtype, batch.slots.device)
    together = (PagedExpansion.of(backend, batch, group, pool) for group in groups)
    return (*together, *(PagedParts.of(backend, batch, request, pool, most_tokens) for request in longer))
