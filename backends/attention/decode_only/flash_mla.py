"""FlashMLA as sgl-kernel builds it: decode steps over rows of latents in pages of 64.

- A row is 512 + 64 wide. Keys and values are read from the pool where it lies; pages may be any distance apart.
- A separate small kernel divides a step among the device's multiprocessors; it reads the lengths on the device: `plan_in_graph`.
- It returns a new tensor, which is copied to the output.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace

from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.base import AttentionCall
from paged_attn.backends.attention.capabilities import OneOf
from paged_attn.backends.attention.decode_only.base import LATENT_DECODE, DecodeOnlyBackend
from paged_attn.backends.attention.flash_style import check_pool, for_kernel
from paged_attn.backends.needs import SGL_KERNEL, importing


@dataclass(slots=True)
class FlashMlaPlan:
    """`schedules`: number of query heads -> (how multiprocessors share the step [parts, 8], splits of requests [R + 1]), int32."""

    batch: Batch
    pool: KVPool
    schedules: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class FlashMlaBackend(DecodeOnlyBackend):
    """FlashMLA on Hopper; for prefill name another backend in front: backend="fa3,flash_mla"."""

    name, prefill_with = "flash_mla", "fa3"
    capabilities = replace(
        LATENT_DECODE,
        architectures=frozenset({90}),
        page_sizes=OneOf({64}),
        requirements=(SGL_KERNEL,),
        note="FlashMLA of sgl-kernel, decode only: use it as fa3,flash_mla",
    )

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        with importing(self.name, "sgl_kernel with FlashMLA", *self.capabilities.requirements):
            importlib.import_module("sgl_kernel.flashmla_ops")  # flash_mla can be imported without it, and then fails when called
            module = importlib.import_module("sgl_kernel.flash_mla")
        self._schedule, self._attend = module.get_mla_metadata, module.flash_mla_with_kvcache

    def plan(self, batch: Batch, pool: KVPool) -> FlashMlaPlan:
        """Plans nothing on the host. Raises UnsupportedError: see `check_pool`."""
        self.check_once(pool)
        return FlashMlaPlan(batch, pool)

    def check_pool(self, pool: KVPool) -> None:
        """Checks that its rows start at multiples of 16 bytes."""
        check_pool(pool, self.name)

    def plan_in_graph(self, plan: FlashMlaPlan) -> None:
        if plan.batch.num_requests:
            for heads in {spec.num_q_heads for spec in plan.pool.layers if isinstance(spec, LatentSpec)}:
                plan.schedules[heads] = self._schedule(plan.batch.seq_lens, heads, 1)

    def forward_decode(self, plan: FlashMlaPlan, call: AttentionCall) -> None:
        batch, rows, spec = plan.batch, plan.pool.key(call.layer_id), call.spec
        count = batch.num_requests
        schedule, splits = plan.schedules[spec.num_q_heads]
        result, _ = self._attend(
            for_kernel(call.query[:count], rows.dtype)[:, None], rows, batch.page_table, batch.seq_lens, spec.v_head_dim, schedule, splits,
            softmax_scale=spec.scale, causal=True,
        )  # fmt: skip
        call.output[:count].copy_(result[:, 0])
