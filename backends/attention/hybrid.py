"""Two backends as one: the first serves prefill, the second decode. "fa3,flashinfer" names such a pair.

A step goes to one of them as a whole: a batch in mode DECODE to the second, any other to the first.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from paged_attn.attn_ops.batch.batch import Batch, ForwardMode
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionBackend, AttentionCall
from paged_attn.backends.attention.capabilities import ANY_SIZE, Both, Capabilities, Feature, GraphSupport, Sizes

EXTEND, DECODE = frozenset({"extend"}), frozenset({"decode"})
NOT_DETERMINISTIC = "two backends are not batch-invariant: which of them computes a decode row depends on the rest of the batch"


@dataclass
class HybridPlan:
    """A step, the backend that serves it, and that backend's plan."""

    batch: Batch
    child: AttentionBackend
    plan: Any


class HybridBackend(AttentionBackend):
    """Base of the classes that `hybrid_of` makes. Only the child that serves a step plans it. It is never batch-invariant."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        super().__init__()
        self.prefill, self.decode = prefill, decode

    def while_compiling_ahead(self) -> HybridBackend:
        left: Any = copy(self)
        left.prefill, left.decode = (each.while_compiling_ahead() for each in (self.prefill, self.decode))
        return left  # type: ignore[no-any-return]

    def plan(self, batch: Batch, pool: KVPool) -> HybridPlan:
        child = self.decode if batch.mode is ForwardMode.DECODE else self.prefill
        return HybridPlan(batch, child, child.plan(batch, pool))

    def plan_in_graph(self, plan: HybridPlan) -> None:
        plan.child.plan_in_graph(plan.plan)

    def graph_support(self) -> GraphSupport:
        return self.decode.graph_support()

    def for_graph(self, max_requests: int, max_pages: int) -> AttentionBackend:
        """The graph backend of `decode`, since graphs contain only decode steps."""
        return self.decode.for_graph(max_requests, max_pages)

    def refresh(self, plan: HybridPlan, batch: Batch) -> None:
        plan.child.refresh(plan.plan, batch)

    def graph_lengths(self, requests: int, max_context: int, pool: KVPool) -> tuple[int, ...]:
        return self.decode.graph_lengths(requests, max_context, pool)

    def graph_variant(self, batch: Batch, pool: KVPool) -> int:
        return self.decode.graph_variant(batch, pool)

    def forward(self, plan: HybridPlan, *operands: Any, **options: Any) -> None:
        """The child's own `forward`, which may fuse the KV write into attention."""
        plan.child.forward(plan.plan, *operands, **options)

    def attends_expanded(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> bool:
        """What `prefill` says, because decode steps expand nothing."""
        return self.prefill.attends_expanded(spec, dtype, device)

    def write_kv(self, plan: HybridPlan, call: AttentionCall) -> None:
        plan.child.write_kv(plan.plan, call)

    def forward_extend(self, plan: HybridPlan, call: AttentionCall) -> None:
        plan.child.forward_extend(plan.plan, call)

    def forward_decode(self, plan: HybridPlan, call: AttentionCall) -> None:
        plan.child.forward_decode(plan.plan, call)


def hybrid_of(prefill: AttentionBackend, decode: AttentionBackend) -> HybridBackend:
    """The backend that prefills with one and decodes with the other; its name is `prefill.name,decode.name`.

    Raises:
        UnsupportedError: one of them does not serve its phase.
    """
    for child, role, phases in ((prefill, "prefill", EXTEND), (decode, "decode", DECODE)):
        if missing := phases - child.capabilities.phases:
            raise UnsupportedError(f"{child.name} cannot serve {role}: its capabilities lack {', '.join(sorted(missing))}")

    class Hybrid(HybridBackend):
        name = f"{prefill.name},{decode.name}"
        capabilities = shared_capabilities(prefill.capabilities, decode.capabilities)

    return Hybrid(prefill, decode)


def shared_capabilities(prefill: Capabilities, decode: Capabilities) -> Capabilities:
    """What both can run, each in its phase. Never batch-invariant."""
    devices = frozenset(d for d in prefill.devices | decode.devices if prefill.runs_on(d) and decode.runs_on(d))
    architectures = prefill.architectures & decode.architectures or prefill.architectures | decode.architectures
    if prefill.architectures and decode.architectures and not prefill.architectures & decode.architectures:
        devices, architectures = devices - {"cuda"}, frozenset()
    phases = (prefill.phases & {"extend"}) | (decode.phases & {"decode"})
    pairs = frozenset(p for p in prefill.dim_pairs | decode.dim_pairs if _runs_pair(prefill, p) and _runs_pair(decode, p))
    requirements = dict.fromkeys(prefill.requirements + decode.requirements)
    return Capabilities(
        devices=devices,
        dtypes=prefill.dtypes & decode.dtypes,
        kv_dtypes=prefill.kv_dtypes & decode.kv_dtypes,
        features=(prefill.features & decode.features) - {Feature.DETERMINISTIC},
        architectures=architectures,
        head_dims=_shared(prefill.head_dims, decode.head_dims),
        page_sizes=_shared(prefill.page_sizes, decode.page_sizes),
        group_sizes=_shared(prefill.group_sizes, decode.group_sizes),
        graphs={"extend": prefill.graphs.get("extend", GraphSupport.NEVER), "decode": decode.graphs.get("decode", GraphSupport.NEVER)},
        requirements=tuple(requirements),
        note="two backends: prefill, decode",
        phases=phases,
        dim_pairs=pairs,
        latent_dims=_shared_latents(prefill, decode),
        conflicts=prefill.conflicts | decode.conflicts,
    )


def _runs_pair(capabilities: Capabilities, pair: tuple[int, int]) -> bool:
    if Feature.UNEQUAL_DIMS in capabilities.features:
        return all(dim in capabilities.head_dims for dim in pair)
    return pair in capabilities.dim_pairs


def _shared_latents(prefill: Capabilities, decode: Capabilities) -> tuple[Sizes, Sizes] | None:
    """None if `head_dims` apply to both."""
    if prefill.latent_dims == decode.latent_dims:
        return prefill.latent_dims
    (rank, rotated), (other_rank, other_rotated) = (each.latent_dims or (each.head_dims, ANY_SIZE) for each in (prefill, decode))
    return _shared(rank, other_rank), _shared(rotated, other_rotated)


def _shared(one: Sizes, other: Sizes) -> Sizes:
    if one == other or other == ANY_SIZE:
        return one
    return other if one == ANY_SIZE else Both(one, other)
