"""Keys and values are made of the rows into a pool of their own, for a backend whose kernels attend to them faster than PyTorch's do.

That pool has pages of one token, so that contexts of any lengths lie end to end, and the products write keys and values where they belong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.batch.part import part_of
from paged_attn.attn_ops.context import Backend
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.latent import LatentCall
from paged_attn.backends.attention.latent.expanded import expand


@dataclass(frozen=True)
class PagedExpansion:
    """Requests whose contexts are expanded together, new prompts or not, and the backend's plan for them.

    Attributes:
        batch: of these requests; its pages are the tokens of `pool`, from page 1 on.
        pool: of expanded keys and values, as layer 0; layers of a step use it one after the other.
        rows: of the step, that are the batch's; a slice where the requests are neighbours.
        slots: [tokens of all contexts] int64, of their rows in the pool of latents.
    """

    batch: Batch
    plan: Any
    pool: KVPool
    rows: slice | Tensor
    slots: Tensor

    @classmethod
    def of(cls, backend: Backend, batch: Batch, requests: Sequence[int], pool: KVPool) -> PagedExpansion:
        """For requests of a step, by their places, ascending; `pool` has a page for each of their tokens, and page 0."""
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
        no_value = query[..., : call.spec.value_dim]  # of the right shape: keys and values are in the pool
        backend.forward(self.plan, 0, self.pool.layers[0], query, query, no_value, output, save_kv_cache=False)
        if not neighbours:
            call.output[self.rows] = output


def expand_into(pool: KVPool, call: LatentCall, latents: KVPool, slots: Tensor) -> None:
    """Keys and values of tokens whose rows lie in `slots` of `latents`, to the pages from 1 on of a pool with pages of one token."""
    tokens = slice(1, 1 + slots.shape[0])
    keys, values = (each[tokens, 0].transpose(0, 1) for each in (pool.key(0), pool.value(0)))
    expand(call, latents, slots, keys, values)


def groups_of(lengths: Sequence[int], requests: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Requests in their order, in groups of at most so many tokens; none of them has more alone."""
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
