"""Turns the `AttentionCall` of a layer of latents into the arguments of its two kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.base import AttentionCall
from paged_attn.backends.attention.flash_style import for_kernel
from paged_attn.backends.attention.triton.latent.attend_kernel import attend_latent
from paged_attn.backends.attention.triton.latent.merge_kernel import merge_latent
from paged_attn.backends.attention.triton.plan import Plan
from paged_attn.backends.attention.triton.work_partition import PartitionKind, WorkPartition, kept_rows
from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.machine import power_of_2
from paged_attn.backends.unit_stride import unit_last

_attend, _merge = FastKernel(attend_latent), FastKernel(merge_latent)

FEW_ITEMS = 8  # up to this many items, several programs merge each row


@dataclass
class LatentLaunch:
    """What stays the same from step to step in one kind of launch of one layer. The step's rows must already be in the pool."""

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
        block_r = power_of_2(max(spec.rank, 16))
        shared = {"GROUP": kind.group, "RANK": spec.rank, "BLOCK_M": tiling.block_m, "KEEP_ROWS": kept}
        self.constants: dict[str, Any] = shared | {
            "ROTATED": spec.rotated, "PAGE_SIZE": self.page_size, "ROWS": kind.rows, "BLOCK_N": tiling.block_n,
            "ITEM_COST": tiling.item_cost,
        }  # fmt: skip
        if tiling.hopper:
            self.constants |= {
                "TOKEN_STRIDE": self.rows.stride(1), "STAGES": tiling.stages, "SUM_REGISTERS": 160,
                "WEIGHT_REGISTERS": 192 - tiling.producer_registers, "PRODUCER_REGISTERS": tiling.producer_registers,
            }  # fmt: skip
            self.options = {"num_warps": 4}
        else:
            self.constants |= {"BLOCK_R": block_r, "BLOCK_E": power_of_2(max(spec.rotated, 16))}
            self.options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        self.merge_constants = shared | {"BLOCK_R": block_r}
        strides = (self.rows.stride(0), self.rows.stride(1))
        self.key = (tuple(self.constants.values()), tuple(self.options.values()), self.rows.dtype, strides)

    def __call__(self, plan: Plan, shares: WorkPartition, call: AttentionCall) -> None:
        """`call.output` must be contiguous in its last dim."""
        rows, output, lse = self.rows, call.output, call.lse_out
        query = for_kernel(call.query, rows.dtype) if self.kind.tiling.hopper else unit_last(call.query)
        self._attend(plan, shares, query, output, lse)
        self._merge(plan, shares, output, lse)

    def _attend(self, plan: Plan, shares: WorkPartition, query: Tensor, output: Tensor, lse: Tensor | None) -> None:
        batch, rows, hopper = plan.batch, self.rows, self.kind.tiling.hopper
        strides = (*query.stride()[:2], *output.stride()[:2], 0 if lse is None else lse.stride(0))
        kernel = _hopper_kernel() if hopper else _attend
        extra: dict[str, Any] = {"HAS_LSE": lse is not None}
        if not hopper:
            extra["PRECISION"] = "ieee" if query.element_size() > 2 else "tf32"
        kernel(
            (self.key, query.dtype, output.dtype, lse is not None, strides), (shares.programs, 1),
            (
                query, rows, output, output if lse is None else lse, batch.page_table, batch.seq_lens, batch.query_start, shares.work,
                plan.partial, plan.partial_stats, batch.page_table.stride(0), rows.stride(0), *(() if hopper else (rows.stride(1),)),
                *strides, self.spec.scale,
            ),
            self.constants | extra, self.options, self.device,
        )  # fmt: skip

    def _merge(self, plan: Plan, shares: WorkPartition, output: Tensor, lse: Tensor | None) -> None:
        """A few items are merged by many programs each; one program looks for an item among many shares. Not if a row's arithmetic must not
        depend on the batch.
        """
        out_strides = (*output.stride()[:2], 0 if lse is None else lse.stride(0))
        tiling, constants, programs = self.kind.tiling, self.merge_constants, shares.programs
        most, early, block_r = min(programs, shares.most_items), bool(tiling.early), constants["BLOCK_R"]
        shares_each = max(1, power_of_2(programs // (2 * most) + 1) // 2)
        columns, parts, warps = block_r, tiling.merge_parts, 4
        if most <= FEW_ITEMS and tiling.part_blocks == 0:
            columns = min(block_r, 128)
            parts, warps = 8192 // columns, 8
        _merge(
            (self.key, shares_each, columns, parts, early, output.dtype, lse is not None, out_strides),
            (-(-programs // shares_each), constants["KEEP_ROWS"] * block_r // columns),
            (output, output if lse is None else lse, shares.work, plan.partial, plan.partial_stats, programs, *out_strides),
            constants | {"HAS_LSE": lse is not None, "SHARES": shares_each, "COLUMNS": columns, "PARTS": parts, "EARLY": early},
            {"num_warps": warps, "launch_pdl": early}, self.device,
        )  # fmt: skip


@cache
def _hopper_kernel() -> FastKernel:
    """Imported on first use, since Gluon has no interpreter."""
    from paged_attn.backends.attention.triton.latent.hopper_kernel import attend_latent_hopper

    return FastKernel(attend_latent_hopper)
