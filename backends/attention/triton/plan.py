"""The Triton backend's plan of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.kv.kv_pool import KVPool, once_per_pool
from paged_attn.attn_ops.specs.attention import AttentionSpec, ChunkPart
from paged_attn.attn_ops.specs.dual_chunk import DualChunkSpec
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.triton.tiling import RowsKind, few_keys, one_block_keys, shares_keys, tiling
from paged_attn.backends.attention.triton.work_partition import PartitionKind, WorkPartition, deal, partial_rows
from paged_attn.backends.machine import machine_of, power_of_2


@dataclass
class Plan:
    """`by_layer`: for each layer and each `chunk_part` of it, the indices in `shares` of its launches.

    The workspace for partial results is shared by all layers: partial [slots * rows * v_dim], partial_stats [2 * slots * rows], float32.
    """

    batch: Batch
    pool: KVPool
    shares: list[WorkPartition]
    by_layer: tuple[dict[ChunkPart, tuple[int, ...]], ...]
    partial: Tensor
    partial_stats: Tensor

    @classmethod
    def of(cls, batch: Batch, pool: KVPool, deterministic: bool) -> Plan:
        new, machine = batch.query_lens_host, machine_of(batch.slots.device)
        lengths = batch.seq_lens_host
        longest, context, total = max(new, default=0), max(lengths, default=0), sum(lengths)
        decoded = [length for length, count in zip(lengths, new, strict=True) if count == 1]
        decodes = len(decoded)
        first = 0 if deterministic or any(count != 1 for count in new[:decodes]) else decodes  # decodes, if they come before all prompts
        rows: list[RowsKind] = []
        if deterministic:
            rows += ["all"] if new else []
        else:
            rows += ["one"] if decodes else []
            rows += ["more"] if longest > 1 else []
        alone = sum(decoded)
        keys: dict[RowsKind, int] = {"one": alone, "together": alone, "more": total - alone, "all": total}
        kinds_of_layers = layer_kinds(pool)
        machine = machine if kinds_of_layers.aligned else replace(machine, hopper=False)
        indices: dict[PartitionKind, int] = {}
        by_kind = []
        for spec in kinds_of_layers.specs:
            together = shares_keys(spec, pool.dtype, first, alone, machine)
            of_spec: list[RowsKind] = ["together" if together and each == "one" else each for each in rows]
            kinds = [PartitionKind.of(spec, r, tiling(r, spec, pool.dtype, longest, context, keys[r], machine, decodes)) for r in of_spec]
            by_kind.append(tuple(indices.setdefault(kind, len(indices)) for kind in kinds))
        shares = [
            WorkPartition.allocate(kind, batch, machine.multiprocessors, first if kind.rows == "together" else len(new)) for kind in indices
        ]
        slots = max((partial_rows(s.kind, s.programs) for s in shares), default=0)
        workspace = torch.empty(slots * (kinds_of_layers.v_dim + 2), dtype=torch.float32, device=batch.slots.device)
        return cls(batch, pool, shares, kinds_of_layers.launches(tuple(by_kind)), workspace[2 * slots :], workspace[: 2 * slots])


def deal_plans(plans: Sequence[Plan], model_follows: bool) -> None:
    """Divides the work of a step on the device, given a plan for each group of layers. Groups whose layers are of one kind share its
    partition, if that does not depend on their page tables.

    Args:
        model_follows: other kernels are launched before the first attention.
    """
    shared: dict[PartitionKind, WorkPartition] = {}
    dealt: list[tuple[WorkPartition, Batch]] = []
    for plan in plans:
        for index, each in enumerate(plan.shares):
            if each.kind.one_tile and (known := shared.setdefault(each.kind, each)) is not each:
                plan.shares[index] = known
            else:
                dealt.append((each, plan.batch))
    deal([each for each, _ in dealt], [batch for _, batch in dealt], model_follows)


@dataclass(frozen=True)
class LayerKinds:
    """The distinct specs of a pool's layers, which of them each layer has, by `chunk_part`, and the widest V as a power of two.

    A layer of dual chunk attention has three specs; one that no attention backend computes has none. `aligned`: all K and V start at
    multiples of 16 bytes, as `attend_hopper` requires.
    """

    specs: tuple[AttentionSpec, ...]
    by_layer: tuple[dict[ChunkPart, int], ...]
    v_dim: int
    aligned: bool
    _launches: dict[tuple[tuple[int, ...], ...], tuple[dict[ChunkPart, tuple[int, ...]], ...]] = field(default_factory=dict, compare=False)

    def launches(self, by_kind: tuple[tuple[int, ...], ...]) -> tuple[dict[ChunkPart, tuple[int, ...]], ...]:
        """`Plan.by_layer`, given what each of `specs` launches; cached, since steps of one kind launch the same."""
        if by_kind not in self._launches:
            self._launches[by_kind] = tuple({part: by_kind[kind] for part, kind in parts.items()} for parts in self.by_layer)
        return self._launches[by_kind]


@once_per_pool
def layer_kinds(pool: KVPool) -> LayerKinds:
    indices: dict[AttentionSpec, int] = {}
    by_layer = tuple(
        {each.chunk_part: indices.setdefault(replace(each, kv_layer=0, module=""), len(indices)) for each in attentions(spec)}
        for spec in pool.layers
    )
    starts = [view(layer).storage_offset() for layer in range(len(by_layer)) for view in (pool.key, pool.value)]
    aligned = all(elements * pool.dtype.itemsize % 16 == 0 for elements in (*starts, pool.page_elements))
    return LayerKinds(tuple(indices), by_layer, widest_value(indices), aligned)


def widest_value(specs: Iterable[AttentionSpec]) -> int:
    """The widest V as a power of two; 0 without specs."""
    return max((power_of_2(max(spec.v_head_dim, 16)) for spec in specs), default=0)


def attentions(spec: AttentionSpec) -> tuple[AttentionSpec, ...]:
    """The specs with which a backend's `forward` is called for a layer."""
    if isinstance(spec, DualChunkSpec):
        return spec.parts
    return (spec,) if spec.by_backend else ()


def small_steps(pool: KVPool, requests: int) -> tuple[int, ...]:
    """The most keys, over all requests, of the kinds of decode steps below the largest one: those whose programs have a block each, of a
    single request, and those that count as small (see `few_keys`); for every kind of layer of the pool, ascending.

    Layers of latents are launched in the same way for all steps.
    """
    machine, specs = machine_of(pool.device), layer_kinds(pool).specs
    given = [spec for spec in specs if not isinstance(spec, LatentSpec)]
    few = min((few_keys(spec, pool.dtype, machine) for spec in given), default=0)
    alone = min((keys for spec in given if (keys := one_block_keys(spec, machine))), default=few) if requests == 1 else few
    return (alone, few) if alone < few else (few,)
