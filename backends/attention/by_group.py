"""One backend for a pool with groups of layers: it plans each group separately, with that group's page table and layers.

So backends need not know about groups: the one inside is called once per group, with a batch and a pool of that group's layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.attention.base import AttentionBackend, AttentionCall
from paged_attn.backends.attention.capabilities import GraphSupport


@dataclass
class GroupPlan:
    """A step, and the plan of each group."""

    batch: Batch
    plans: list[Any]


class GroupedBackend(AttentionBackend):
    """Base of the classes that `by_group` makes.

    Args:
        children: one for each group; may be the same object.
        indices: layer -> (its group, its index in the group).
    """

    def __init__(self, children: Sequence[AttentionBackend], indices: dict[int, tuple[int, int]]) -> None:
        self.children, self.indices, self.deterministic = tuple(children), indices, children[0].deterministic

    def plan(self, batch: Batch, pool: KVPool) -> GroupPlan:
        if len(batch.groups) != len(pool.parts):
            raise ContextError(
                f"the pool has {len(pool.parts)} groups of layers, and the batch page tables of {len(batch.groups) or 1}; build it of "
                "RequestColumns with group_tables, or take a pool without groups"
            )
        parts = zip(self.children, pool.parts, strict=True)
        return GroupPlan(batch, [child.plan(batch.of_group(i), part) for i, (child, part) in enumerate(parts)])

    def plan_in_graph(self, plan: GroupPlan) -> None:
        self.plan_groups_in_graph([plan])

    def plan_groups_in_graph(self, plans: Sequence[GroupPlan], model_follows: bool = False) -> None:
        for plan in plans:
            if all(child is self.children[0] for child in self.children):
                self.children[0].plan_groups_in_graph(plan.plans, model_follows)
            else:
                for child, each in zip(self.children, plan.plans, strict=True):
                    child.plan_groups_in_graph([each], model_follows)

    def graph_support(self) -> GraphSupport:
        return self.children[0].graph_support()

    def for_graph(self, max_requests: int, max_pages: int) -> AttentionBackend:
        return type(self)([child.for_graph(max_requests, max_pages) for child in self.children], self.indices)

    def refresh(self, plan: GroupPlan, batch: Batch) -> None:
        for index, (child, each) in enumerate(zip(self.children, plan.plans, strict=True)):
            child.refresh(each, batch.of_group(index))

    def graph_lengths(self, requests: int, max_context: int, pool: KVPool) -> tuple[int, ...]:
        """Any group's lengths: they are the same in all."""
        return self.children[0].graph_lengths(requests, max_context, pool)

    def graph_variant(self, batch: Batch, pool: KVPool) -> int:
        return self.children[0].graph_variant(batch, pool)

    def forward(self, plan: GroupPlan, layer_id: int, *operands: Any, **options: Any) -> None:
        group, index = self.indices[layer_id]
        self.children[group].forward(plan.plans[group], index, *operands, **options)

    def _of_group(self, plan: GroupPlan, call: AttentionCall) -> None:
        raise AssertionError("never called, because `forward` calls the `forward` of the group's own backend")

    write_kv = forward_extend = forward_decode = _of_group


def by_group(backend: AttentionBackend, pool: KVPool) -> AttentionBackend:
    """The backend for steps of a pool; unchanged if all layers have one page table."""
    if len(pool.groups) < 2:
        return backend

    class Grouped(GroupedBackend):
        name = backend.name
        capabilities = backend.capabilities

    indices = {layer: (g, index) for g, group in enumerate(pool.groups) for index, layer in enumerate(group.layers)}
    return Grouped([backend] * len(pool.groups), indices)


def without_groups(pool: KVPool, backend: AttentionBackend, num_pages: int) -> tuple[KVPool, AttentionBackend]:
    """For checks on a few pages: pool and backend unchanged or, for a pool with groups, a small one whose layers share a table."""
    if not isinstance(backend, GroupedBackend):
        return pool, backend
    return KVPool(pool.layers, num_pages, pool.page_size, pool.dtype, pool.device), backend.children[0]
