"""PyTorch's own varlen_attn with a block table: the FlashAttention 2 that torch bundles, or FlashAttention 3 where the user activated it.

Traps of torch 2.13, from its sources and issues:
- Through FlashAttention 2, splitting the keys silently gives wrong results for paged ragged batches (pytorch#194167): num_splits is 1.
  torch's documentation calls that batch-invariant. It is not declared so here: the longest query and key still choose the kernel.
- FlashAttention 2 needs the keys' prefix sum besides seqused_k, FlashAttention 3 refuses it; 2 needs page sizes in multiples of 256.
- The log-sum-exp is [q_heads, T], although the docstring says [T, q_heads].
- varlen_attn_out may write to a copy of its output when each request has one query (grouped heads), so it is not used.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.attention.base import AttentionCall, StoringBackend
from paged_attn.backends.attention.capabilities import Capabilities, Feature, Span
from paged_attn.backends.attention.flash_style import finish, for_kernel, key_starts, window_of
from paged_attn.backends.needs import HALF, Requirement


@dataclass(slots=True)
class VarlenPlan:
    batch: Batch
    pool: KVPool
    longest_query: int
    longest: int
    key_starts: Tensor | None = None


class TorchVarlenBackend(StoringBackend):
    name = "torch_varlen"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALF,
        kv_dtypes=HALF,
        features=frozenset({Feature.WINDOW, Feature.SINKS, Feature.BIDIRECTIONAL, Feature.LSE}),
        architectures=frozenset({80, 86, 87, 89, 90, 100, 120}),
        head_dims=Span(8, 256, 8),
        page_sizes=Span(256, 1 << 16, 256),
        requirements=(Requirement("torch", "2.13", "pip install 'torch>=2.13'"),),
        note="torch.nn.attention.varlen, whose varlen_attn has a block_table from torch 2.13 on; pages in multiples of 256 tokens; "
        "sinks are applied after the kernel; tested against torch's own checks, not yet run on a GPU by this project",
    )

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        from torch.nn.attention import varlen

        if not {"block_table", "num_splits"} <= set(inspect.signature(varlen.varlen_attn).parameters):
            install = self.capabilities.requirements[0].install
            raise ImportError(
                f"the torch_varlen backend needs varlen_attn with block_table, which torch {torch.__version__} lacks: {install}"
            )
        from torch.nn.attention import current_flash_attention_impl

        self._attend, self._aux, self._implementation = varlen.varlen_attn, varlen.AuxRequest(lse=True), current_flash_attention_impl

    def plan(self, batch: Batch, pool: KVPool) -> VarlenPlan:
        return VarlenPlan(batch, pool, max(batch.query_lens_host, default=0), max(batch.seq_lens_host, default=0))

    def plan_in_graph(self, plan: VarlenPlan) -> None:
        if self._implementation() != "FA3":
            plan.key_starts = key_starts(plan.batch)

    def forward_extend(self, plan: VarlenPlan, call: AttentionCall) -> None:
        batch, key, value = plan.batch, plan.pool.key(call.layer_id), plan.pool.value(call.layer_id)
        if not batch.num_requests:
            return
        query = for_kernel(call.query[: batch.num_tokens], key.dtype)  # the kernel wants one row per request if all have one token
        result, lse = self._attend(
            query, key, value, batch.query_start, plan.key_starts, plan.longest_query, plan.longest,
            return_aux=self._aux, scale=call.spec.scale, window_size=window_of(call.spec), enable_gqa=call.spec.group_size > 1,
            seqused_k=batch.seq_lens, block_table=batch.page_table, num_splits=1,
        )  # fmt: skip
        finish(call, result, lse.t(), batch.num_tokens, call.sinks)
