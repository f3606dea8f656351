"""A context too long to be expanded at once: new tokens attend to a part after the other, and the results are joined by log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, mode_of
from paged_attn.attn_ops.batch.host_copy import copy_to_device
from paged_attn.attn_ops.batch.part import part_of
from paged_attn.attn_ops.context import Backend
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.latent import LatentCall
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.latent.expanded import slots_of
from paged_attn.backends.attention.latent.paged import PagedExpansion, expand_into, groups_of

CAUSAL, WHOLE = 0, 1  # layers of the pool, with the same keys and values


@dataclass(frozen=True)
class _Piece:
    """Neighbouring new tokens and how they see a part: those in it up to themselves, those behind it all of it."""

    rows: slice
    layer: int
    batch: Batch
    plan: Any


@dataclass(frozen=True)
class PagedParts:
    """One request. `rows` are its own of the step; each of `parts` has the slots of its tokens and the pieces that see it."""

    pool: KVPool
    rows: slice
    parts: tuple[tuple[Tensor, tuple[_Piece, ...]], ...]

    @classmethod
    def of(cls, backend: Backend, batch: Batch, request: int, pool: KVPool, most_tokens: int) -> PagedParts:
        """`pool` has pages for `most_tokens`, and page 0."""
        whole, _ = part_of(batch, [request])
        first, new, length = sum(batch.query_lens_host[:request]), batch.query_lens_host[request], batch.seq_lens_host[request]
        parts = []
        for start in range(0, length, most_tokens):
            end = min(start + most_tokens, length)
            inside = [(CAUSAL, max(start, length - new), end)] if end > length - new else []
            # No more at once than the part has tokens: to a backend they are its last ones.
            behind = [(WHOLE, low, min(low + end - start, length)) for low in range(max(end, length - new), length, end - start)]
            pieces = (_piece(backend, whole, pool, end - start, *piece) for piece in inside + behind)
            parts.append((slots_of(batch, request, start, end), tuple(pieces)))
        return cls(pool, slice(first, first + new), tuple(parts))

    def attend(self, backend: Backend, call: LatentCall, latents: KVPool) -> None:
        """As `PagedExpansion.attend`."""
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
    """Of the request's tokens at positions from `low` up to `high`, which are new ones, over a part of so many tokens."""
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
    """All of these requests: together as many as have no more than `most_tokens`, and alone those that have more."""
    lengths = batch.seq_lens_host
    groups = list(groups_of(lengths, [r for r in requests if lengths[r] <= most_tokens], most_tokens))
    longer = [r for r in requests if lengths[r] > most_tokens]
    tokens = most_tokens if longer else max(sum(lengths[r] for r in group) for group in groups)
    layers = [spec, replace(spec, causal=False)] if longer else [spec]  # kv_layer is 0 for both
    pool = KVPool(layers, 1 + tokens, 1, dtype, batch.slots.device)
    together = (PagedExpansion.of(backend, batch, group, pool) for group in groups)
    return (*together, *(PagedParts.of(backend, batch, request, pool, most_tokens) for request in longer))
