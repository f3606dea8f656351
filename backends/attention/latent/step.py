"""One step of a latent layer: its rows go to the pool, and each request attends in the way that is cheaper for it.

Expanding costs a product for each token of the context; attending to rows costs wider dot products for each pair of tokens. So expanding
is cheaper for many new tokens at once, and attending to rows is cheaper for decode steps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, ForwardMode
from paged_attn.attn_ops.batch.part import part_of
from paged_attn.attn_ops.context import Backend, ForwardContext
from paged_attn.attn_ops.ops.latent import LatentCall
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.latent.expanded import FreshPrompts, attend_expanded, most_tokens, of_like_lengths
from paged_attn.backends.attention.latent.paged import PagedExpansion, PagedParts, paged_expansions
from paged_attn.backends.kv_write.store import store_latent


class LatentBackend(Backend, Protocol):
    """What latent attention needs of a backend besides the context's interface."""

    def attends_expanded(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> bool: ...


@dataclass(frozen=True)
class LatentStep:
    """The requests of a step whose keys and values are expanded, and the others as a batch of their own.

    Attributes:
        paged: requests whose expanded keys and values the backend attends to (`attends_expanded`).
        fresh: new prompts, expanded together.
        continued: (request, its rows) for requests that had rows in the pool before this step, or more than fit into memory together.
        others: (that batch, the backend's plan for it, its rows); None if every request is expanded.
    """

    paged: tuple[PagedExpansion | PagedParts, ...]
    fresh: tuple[FreshPrompts, ...]
    continued: tuple[tuple[int, slice], ...]
    others: tuple[Batch, Any, Tensor] | None


def attend_to_latents(backend: LatentBackend, context: ForwardContext, call: LatentCall, always_absorbed: bool) -> None:
    """Writes `call.output`, and the step's rows to the pool.

    Args:
        always_absorbed: for results that do not depend on how a prompt was cut into steps.
    """
    batch, spec = context.batch, call.spec
    step = None if always_absorbed or batch.mode is ForwardMode.DECODE else _latent_step(backend, context, call)
    if step is None:
        absorbed = absorbed_queries(spec, call.query, call.weight_k)
        store_latent(context.pool, call.layer_id, call.latent, call.rotated, batch, (spec.split(call.query)[1], absorbed))
        attend_absorbed(backend, context.plan, call, absorbed, call.output)
        return
    store_latent(context.pool, call.layer_id, call.latent, call.rotated, batch)
    for expansion in step.paged:
        expansion.attend(backend, call, context.pool)
    for prompts in step.fresh:
        prompts.attend(call, context.pool, batch)
    for request, rows in step.continued:
        attend_expanded(call, context.pool, batch, request, rows)
    if step.others is not None:
        part, plan, at = step.others
        query = call.query[at]
        absorbed = absorbed_queries(spec, query, call.weight_k)
        absorbed[..., spec.rank :] = spec.split(query)[1]
        output = call.output.new_empty((part.num_rows, spec.num_q_heads, spec.value_dim))
        attend_absorbed(backend, plan, call, absorbed, output)
        call.output[at] = output
    call.output[batch.num_tokens :].zero_()


def attend_absorbed(backend: Backend, plan: Any, call: LatentCall, absorbed: Tensor, output: Tensor) -> None:
    """Absorbed queries [T, heads, rank + rotated] attend to the pool's rows; writes output [T, heads, value_dim]."""
    spec = call.spec
    if spec.values is None:
        forward_rows(backend, plan, call, absorbed, output)
        return
    assert call.weight_v is not None
    sums = absorbed.new_empty((absorbed.shape[0], spec.num_q_heads, spec.rank))
    forward_rows(backend, plan, call, absorbed, sums)
    maps = spec.values.of(call.weight_v, spec.num_q_heads, spec.value_dim)  # [heads, value_dim, rank]
    with torch.no_grad():
        torch.bmm(sums.transpose(0, 1), maps.transpose(1, 2), out=output.transpose(0, 1))


def forward_rows(backend: Backend, plan: Any, call: LatentCall, absorbed: Tensor, sums: Tensor) -> None:
    """Writes sums [T, heads, rank] of the pool's latents."""
    no_key = absorbed[:, :1]  # placeholder of the right shape; the step's rows are in the pool
    backend.forward(plan, call.layer_id, call.spec, absorbed, no_key, no_key[..., : call.spec.rank], sums, save_kv_cache=False)


def _latent_step(backend: LatentBackend, context: ForwardContext, call: LatentCall) -> LatentStep | None:
    """None if no request is expanded. Layers of one kind share the step."""
    if context.latent_plan is None:
        context.latent_plan = {}
    spec, most = call.spec, most_tokens(call)
    kind = (spec.keys is None, spec.rank, spec.rotated, spec.key_dim, spec.value_dim, spec.num_q_heads, spec.scale, most)
    if kind not in context.latent_plan:
        context.latent_plan[kind] = _absorb_or_expand(backend, context, spec, call.query.dtype, most)
    step: LatentStep | None = context.latent_plan[kind]
    return step


def _absorb_or_expand(
    backend: LatentBackend, context: ForwardContext, spec: LatentSpec, dtype: torch.dtype, most: int
) -> LatentStep | None:
    batch, device = context.batch, context.pool.device
    starts = list(itertools.accumulate(batch.query_lens_host, initial=0))
    lengths = list(zip(batch.query_lens_host, batch.seq_lens_host, strict=True))
    chosen = [r for r, (new, length) in enumerate(lengths) if expands(spec, new, length - new)]
    if not chosen:
        return None
    others = [r for r in range(batch.num_requests) if r not in set(chosen)]
    planned = None
    if others:
        part, at = part_of(batch, others)
        plan = backend.plan(part, context.pool)
        backend.plan_in_graph(plan)
        planned = (part, plan, at)
    if backend.attends_expanded(spec.expanded, dtype, device):
        return LatentStep(paged_expansions(backend, spec.expanded, dtype, batch, chosen, most), (), (), planned)
    rows = {r: slice(starts[r], starts[r + 1]) for r in chosen}
    whole = [r for r in chosen if lengths[r][0] == lengths[r][1] <= most]
    fresh = tuple(FreshPrompts.of(group, device) for group in of_like_lengths([rows[r] for r in whole], most))
    return LatentStep((), fresh, tuple((r, rows[r]) for r in chosen if r not in set(whole)), planned)


def absorbed_queries(spec: LatentSpec, query: Tensor, weight_k: Tensor | None) -> Tensor:
    """Queries [T, heads, key_dim + rotated] as [T, heads, rank + rotated], whose product with a row is the product with the head's key.

    Their last `rotated` elements are not written yet; they are those of the queries.
    """
    plain, _ = spec.split(query)
    absorbed = query.new_empty((query.shape[0], spec.num_q_heads, spec.qk_head_dim))
    if spec.keys is None:
        absorbed[..., : spec.rank] = plain
        return absorbed
    assert weight_k is not None
    maps = spec.keys.of(weight_k, spec.num_q_heads, spec.key_dim)  # [heads, key_dim, rank]
    with torch.no_grad():
        torch.bmm(plain.transpose(0, 1), maps, out=absorbed[..., : spec.rank].transpose(0, 1))
    return absorbed


def absorbed_operations(spec: LatentSpec, new: int, cached: int) -> float:
    """Multiplications per head for a request's new tokens if they attend to rows."""
    return new * spec.rank * (spec.key_dim + spec.value_dim) + _pairs(new, cached) * (spec.qk_head_dim + spec.rank)


def expanded_operations(spec: LatentSpec, new: int, cached: int) -> float:
    """Multiplications per head if keys and values are first computed from all rows."""
    return (new + cached) * spec.rank * (spec.key_dim + spec.value_dim) + _pairs(new, cached) * (
        spec.key_dim + spec.rotated + spec.value_dim
    )


def expands(spec: LatentSpec, new: int, cached: int) -> bool:
    """Whether a request's keys and values are expanded for its new tokens; never in a decode step, nor where the model absorbs by itself.

    Operations count equally on both sides: `python benchmarks/latent.py` finds a factor of 1 on a CPU, and none that fits on a GPU.
    """
    return spec.keys is not None and new > 1 and expanded_operations(spec, new, cached) < absorbed_operations(spec, new, cached)


def _pairs(new: int, cached: int) -> float:
    return new * cached + new * (new + 1) / 2
