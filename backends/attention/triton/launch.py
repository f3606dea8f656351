"""Turns an `AttentionCall` into a kernel's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionCall, slopes_of
from paged_attn.backends.attention.flash_style import for_kernel
from paged_attn.backends.attention.triton.attend_kernel import attend as attend_kernel
from paged_attn.backends.attention.triton.plan import Plan
from paged_attn.backends.attention.triton.together.attend_kernel import attend_together
from paged_attn.backends.attention.triton.work_partition import PartitionKind, WorkPartition, kept_rows, segments
from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.machine import power_of_2
from paged_attn.backends.unit_stride import unit_last

_general, _shared = FastKernel(attend_kernel), FastKernel(attend_together)


@dataclass
class LayerLaunch:
    """What stays the same from step to step in one kind of launch of one layer."""

    spec: AttentionSpec
    kind: PartitionKind
    keys: Tensor
    values: Tensor
    page_size: int
    device: int
    fused_write: bool
    slopes: Tensor | None

    @classmethod
    def of(cls, pool: KVPool, layer_id: int, kind: PartitionKind, fused_write: bool) -> LayerLaunch:
        spec, device = pool.layers[layer_id], pool.device
        slopes, index = slopes_of(spec, device), device_index(device)
        return cls(spec, kind, pool.key(layer_id), pool.value(layer_id), pool.page_size, index, fused_write, slopes)

    def __post_init__(self) -> None:
        spec, kind, tiling = self.spec, self.kind, self.kind.tiling
        shared = {
            "KV_HEADS": kind.kv_heads, "GROUP": kind.group, "PAGE_SIZE": self.page_size, "ROWS": kind.rows, "CAUSAL": kind.causal,
            "HAS_WINDOW": kind.window is not None, "CHUNKS": kind.chunks, "HAS_SOFTCAP": spec.softcap is not None,
            "HAS_SINKS": spec.has_sinks, "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n,
        }  # fmt: skip
        if tiling.hopper:
            own: dict[str, Any] = {
                "QK_DIM": spec.qk_head_dim, "V_DIM": spec.v_head_dim, "STAGES": tiling.stages, "QUERY_TILES": tiling.query_tiles,
                "TURNS": tiling.turns, "ITEM_COST": tiling.item_cost, "PRODUCER_REGISTERS": tiling.producer_registers,
                "CONSUMER_REGISTERS": (504 - tiling.producer_registers) // 16 * 8,
            }  # fmt: skip
            self.options: dict[str, Any] = {"num_warps": 4}
        elif kind.rows == "together":
            shared = {each: shared[each] for each in ("KV_HEADS", "GROUP", "PAGE_SIZE", "HAS_SOFTCAP", "HAS_SINKS", "BLOCK_M", "BLOCK_N")}
            own = {
                "QK_DIM": spec.qk_head_dim, "V_DIM": spec.v_head_dim, "FUSED_WRITE": self.fused_write, "MEMBERS": kind.members,
                "SEGMENTS": segments(kind), "BLOCK_D": power_of_2(max(spec.qk_head_dim, 16)),
                "BLOCK_DV": power_of_2(max(spec.v_head_dim, 16)), "MERGE_PARTS": tiling.merge_parts, "ITEM_COST": tiling.item_cost,
            }  # fmt: skip
            self.options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        else:
            own = {
                "QK_DIM": spec.qk_head_dim, "V_DIM": spec.v_head_dim, "HAS_ALIBI": spec.alibi_slopes is not None,
                "BIAS": spec.bias_index or "none", "FUSED_WRITE": self.fused_write, "ALIGN": kind.align,
                "BLOCK_D": power_of_2(max(spec.qk_head_dim, 16)), "BLOCK_DV": power_of_2(max(spec.v_head_dim, 16)),
                "KEEP_ROWS": kept_rows(kind), "MERGE_PARTS": tiling.merge_parts, "EARLY": tiling.early,
                "FIRST_BLOCK_EARLY": tiling.first_block_early and self.fused_write, "ITEM_COST": tiling.item_cost,
            }  # fmt: skip
            self.options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "launch_pdl": tiling.early}
        self.constants = shared | own
        pool_strides = (self.keys.stride(0), *self.keys.stride()[1:3], *self.values.stride()[1:3])
        self.key = (tuple(self.constants.values()), tuple(self.options.values()), self.keys.dtype, pool_strides)

    def __call__(self, plan: Plan, shares: WorkPartition, call: AttentionCall) -> None:
        """`call.output` must be contiguous in its last dim."""
        if self.kind.tiling.hopper:
            # The kernel copies 16 bytes of q at a time, and multiplies it with K in the pool's dtype.
            self._hopper(plan, shares, call, for_kernel(call.query, self.keys.dtype))
        elif self.kind.rows == "together":
            self._together(plan, shares, call, unit_last(call.query))
        else:
            self._general(plan, shares, call, unit_last(call.query))

    def _general(self, plan: Plan, shares: WorkPartition, call: AttentionCall, query: Tensor) -> None:
        spec, kind, batch, keys, values, output = self.spec, self.kind, plan.batch, self.keys, self.values, call.output
        lse, bias, sinks, slopes = call.lse_out, unit_last(call.bias), unit_last(call.sinks), self.slopes
        key, value = (unit_last(call.key), unit_last(call.value)) if self.fused_write else (query, query)
        strides = query.stride()[:2] + output.stride()[:2] + key.stride()[:2] + value.stride()[:2]
        extra = (0 if lse is None else lse.stride(0), 0 if bias is None else bias.stride(0))
        constants = self.constants | {"HAS_LSE": lse is not None, "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32"}
        _general(
            (self.key, query.dtype, key.dtype, value.dtype, output.dtype, sinks is not None and sinks.dtype, lse is not None,
             bias is not None and bias.dtype, strides, extra),
            (shares.programs, 1),
            (
                query, keys, values, output, key, value, query if sinks is None else sinks, query if slopes is None else slopes,
                query if bias is None else bias, output if lse is None else lse, batch.page_table, batch.seq_lens, batch.query_start,
                shares.work, plan.partial, plan.partial_stats, shares.counters, batch.page_table.stride(0),
                keys.stride(0), keys.stride(1), keys.stride(2), values.stride(1), values.stride(2), *strides, *extra,
                0 if bias is None else bias.shape[1], spec.scale, spec.softcap or 1.0, kind.window or 0, kind.chunk or 0,
            ),
            constants, self.options, self.device,
        )  # fmt: skip

    def _together(self, plan: Plan, shares: WorkPartition, call: AttentionCall, query: Tensor) -> None:
        spec, batch, keys, values, output = self.spec, plan.batch, self.keys, self.values, call.output
        lse, sinks = call.lse_out, unit_last(call.sinks)
        key, value = (unit_last(call.key), unit_last(call.value)) if self.fused_write else (query, query)
        strides = query.stride()[:2] + output.stride()[:2] + key.stride()[:2] + value.stride()[:2] + (0 if lse is None else lse.stride(0),)
        constants = self.constants | {"HAS_LSE": lse is not None, "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32"}
        _shared(
            (self.key, query.dtype, key.dtype, value.dtype, output.dtype, sinks is not None and sinks.dtype, lse is not None, strides),
            (shares.programs, 1),
            (
                query, keys, values, output, key, value, query if sinks is None else sinks, output if lse is None else lse,
                batch.page_table, batch.seq_lens, shares.ends, shares.work, plan.partial, plan.partial_stats, shares.counters,
                batch.page_table.stride(0), keys.stride(0), keys.stride(1), keys.stride(2), values.stride(1),
                values.stride(2), *strides, spec.scale, spec.softcap or 1.0,
            ),
            constants, self.options, self.device,
        )  # fmt: skip

    def _hopper(self, plan: Plan, shares: WorkPartition, call: AttentionCall, query: Tensor) -> None:
        spec, kind, batch, keys, values, output = self.spec, self.kind, plan.batch, self.keys, self.values, call.output
        lse, sinks = call.lse_out, unit_last(call.sinks)
        strides = query.stride()[:2] + output.stride()[:2] + (0 if lse is None else lse.stride(0),)
        _hopper_kernel()(
            (self.key, query.dtype, output.dtype, sinks is not None and sinks.dtype, lse is not None, strides),
            (shares.programs, 1),
            (
                query, keys, values, output, query if sinks is None else sinks, output if lse is None else lse, batch.page_table,
                batch.seq_lens, batch.query_start, shares.work, plan.partial, plan.partial_stats, shares.counters,
                batch.page_table.stride(0), keys.stride(0), keys.stride(1), keys.stride(2), values.stride(1), values.stride(2), *strides,
                spec.scale, spec.softcap or 1.0, kind.window or 0, kind.chunk or 0,
            ),
            self.constants | {"HAS_LSE": lse is not None}, self.options, self.device,
        )  # fmt: skip


@cache
def _hopper_kernel() -> FastKernel:
    """Imported on first use, since Gluon has no interpreter."""
    from paged_attn.backends.attention.triton.hopper.kernel import attend_hopper

    return FastKernel(attend_hopper)
