"""From an `AttentionCall` of a layer of latents to the arguments of its two kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.base import AttentionCall
from paged_attn.backends.attention.triton.latent.attend_kernel import attend_latent
from paged_attn.backends.attention.triton.latent.merge_kernel import merge_latent
from paged_attn.backends.attention.triton.launch import unit_last
from paged_attn.backends.attention.triton.plan import Plan, kept_rows
from paged_attn.backends.attention.triton.tiling import power_of_2
from paged_attn.backends.attention.triton.work_partition import PartitionKind, WorkPartition
from paged_attn.backends.fast_launch import FastKernel, device_index

_attend, _merge = FastKernel(attend_latent), FastKernel(merge_latent)

MERGING_PROGRAMS = 16  # of an item


@dataclass
class LatentLaunch:
    """What stays the same from step to step of one kind of launch of one layer. The step's rows are in the pool when it is called."""

    spec: LatentSpec
    kind: PartitionKind
    rows: Tensor
    page_size: int
    device: int

    @classmethod
    def of(cls, pool: KVPool, layer_id: int, kind: PartitionKind) -> LatentLaunch:
        spec = pool.layers[layer_id]
        assert isinstance(spec, LatentSpec)
        return cls(spec, kind, pool.key(layer_id), pool.page_size, device_index(pool.device))

    def __post_init__(self) -> None:
        spec, kind, tiling, kept = self.spec, self.kind, self.kind.tiling, kept_rows(self.kind)
        shared = {"GROUP": kind.group, "RANK": spec.rank, "BLOCK_M": tiling.block_m, "BLOCK_R": power_of_2(max(spec.rank, 16))}
        self.constants: dict[str, Any] = shared | {
            "ROTATED": spec.rotated, "PAGE_SIZE": self.page_size, "ROWS": kind.rows, "BLOCK_N": tiling.block_n,
            "BLOCK_E": power_of_2(max(spec.rotated, 16)), "KEEP_ROWS": kept, "ITEM_COST": tiling.item_cost,
        }  # fmt: skip
        merge_rows = max(1, kept // MERGING_PROGRAMS)
        self.merge_constants = shared | {"KEEP_ROWS": kept, "MERGE_ROWS": merge_rows, "MERGE_PARTS": tiling.merge_parts}
        self.options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        self.mergers = kept // merge_rows
        strides = (self.rows.stride(0), self.rows.stride(1))
        self.key = (tuple(self.constants.values()), tiling.merge_parts, tuple(self.options.values()), self.rows.dtype, strides)

    def __call__(self, plan: Plan, shares: WorkPartition, call: AttentionCall) -> None:
        """`call.output` has its last dim contiguous."""
        batch, rows, output, lse, query = plan.batch, self.rows, call.output, call.lse_out, unit_last(call.query)
        out_strides = (*output.stride()[:2], 0 if lse is None else lse.stride(0))
        strides, lse_at = (*query.stride()[:2], *out_strides), output if lse is None else lse
        key, has_lse = (self.key, query.dtype, output.dtype, lse is not None, strides), {"HAS_LSE": lse is not None}
        precision = "ieee" if query.element_size() > 2 else "tf32"
        _attend(
            key, (shares.programs, 1),
            (
                query, rows, output, lse_at, batch.page_table, batch.seq_lens, batch.query_start, shares.work, plan.partial,
                plan.partial_stats, batch.page_table.stride(0), rows.stride(0), rows.stride(1), *strides, self.spec.scale,
            ),
            self.constants | has_lse | {"PRECISION": precision}, self.options, self.device,
        )  # fmt: skip
        _merge(
            key, (shares.programs, self.mergers), (output, lse_at, shares.work, plan.partial, plan.partial_stats, *out_strides),
            self.merge_constants | has_lse, {"num_warps": 4}, self.device,
        )  # fmt: skip
