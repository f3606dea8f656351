"""A backend whose decode step can be recorded on the CPU: operations of fixed shape on lengths that it reads from tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from paged_attn.backends.attention.capabilities import Feature, GraphSupport
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from paged_attn.backends.kv_write.store import store_kv

SHORT = 8


class FixedPlan:
    def __init__(self, batch, pool):
        self.batch, self.pool, self.most_keys = batch, pool, max(batch.seq_lens_host)


class FixedBackend(TorchNativeBackend):
    """Two variants, for contexts up to SHORT and for all: each looks at that many keys only, so that a wrong choice shows."""

    name = "fixed"
    capabilities = replace(
        TorchNativeBackend.capabilities,
        graphs={"extend": GraphSupport.NEVER, "decode": GraphSupport.ALWAYS},
        features=TorchNativeBackend.capabilities.features & {Feature.WINDOW},
    )

    def __init__(self):
        super().__init__()
        self.plans = self.refreshed = 0

    def plan(self, batch, pool):
        self.plans += 1
        if batch.mode.value == "decode":
            return FixedPlan(batch, pool)
        return super().plan(batch, pool)

    def refresh(self, plan, batch):
        self.refreshed += 1

    def graph_lengths(self, requests, max_context, pool):
        return (SHORT, max_context)

    def graph_variant(self, batch, pool):
        return 0 if max(batch.seq_lens_host) <= SHORT else 1

    def write_kv(self, plan, call):
        if isinstance(plan, FixedPlan):
            store_kv(plan.pool, call.layer_id, call.key, call.value, plan.batch)
        else:
            super().write_kv(plan, call)

    def forward_decode(self, plan, call):
        if not isinstance(plan, FixedPlan):
            return super().forward_decode(plan, call)
        batch, pool, spec = plan.batch, plan.pool, call.spec
        position = torch.arange(plan.most_keys)
        pages = batch.page_table[:, : -(-plan.most_keys // pool.page_size)].long()
        pages = pages.repeat_interleave(pool.page_size, 1)[:, : plan.most_keys]
        seen = position[None] < batch.seq_lens[:, None]
        if spec.sliding_window is not None:
            seen = seen & (position[None] >= batch.seq_lens[:, None] - spec.sliding_window)
        offset = position % pool.page_size
        keys = pool.key(call.layer_id)[pages * seen, offset[None]]
        values = pool.value(call.layer_id)[pages * seen, offset[None]]
        keys, values = (torch.where(seen[:, :, None, None], t, 0.0).transpose(1, 2) for t in (keys, values))
        rows = batch.num_requests
        out = F.scaled_dot_product_attention(
            call.query[:rows, :, None], keys.repeat_interleave(spec.group_size, 1), values.repeat_interleave(spec.group_size, 1),
            attn_mask=seen[:, None, None], scale=spec.scale,
        )  # fmt: skip
        call.output[:rows].copy_(out[:, :, 0])
