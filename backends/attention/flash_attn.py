"""FlashAttention 2 on the page table: `flash_attn_with_kvcache` for decode, `flash_attn_varlen_func` with a block_table for the rest.

With ALiBi the kernel's log-sum-exp is not that of our scores: without a window it adds slope * j instead of slope * (j - i), which gives
the same weights. `_log_sum_exp` subtracts slope * i again. Its bidirectional ALiBi is slope * |i - j|, which is not ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, ForwardMode
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.install_line import install_line
from paged_attn.attn_ops.kv.kv_pool import KVPool, once_per_pool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionCall, StoringBackend, slopes_of
from paged_attn.backends.attention.capabilities import DECODE_GRAPHS, Capabilities, Feature, Span
from paged_attn.backends.attention.flash_style import finish, for_kernel, key_starts, window_of
from paged_attn.backends.needs import HALF, Requirement, importing


@dataclass(slots=True)
class Layer:
    """K and V of a layer, its slopes [q_heads] float32 or None, and keyword arguments of both functions."""

    key: Tensor
    value: Tensor
    slopes: Tensor | None
    settings: dict[str, Any]


@dataclass(slots=True)
class FlashAttnPlan:
    batch: Batch
    pool: KVPool
    layers: list[Layer]
    longest_query: int
    longest: int
    key_starts: Tensor | None = None


_layers = once_per_pool(lambda pool: [_layer(pool, index, spec) for index, spec in enumerate(pool.layers)])


class FlashAttnBackend(StoringBackend):
    name = "flash_attn"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALF,
        kv_dtypes=HALF,
        features=frozenset({Feature.WINDOW, Feature.SOFTCAP, Feature.SINKS, Feature.ALIBI, Feature.BIDIRECTIONAL, Feature.LSE}),
        architectures=frozenset({80, 86, 87, 89, 90, 100, 120}),
        head_dims=Span(8, 256, 8),
        page_sizes=Span(256, 1 << 16, 256),
        graphs=DECODE_GRAPHS,
        conflicts=frozenset({frozenset({Feature.ALIBI, Feature.BIDIRECTIONAL})}),
        requirements=(Requirement("flash_attn", "2.7", install_line("flash-attn")),),
        note="pages in multiples of 256 tokens, because a tile of the kernel may hold 256 keys and is read from one page; "
        "sinks are applied after the kernel; tested against its signature, not yet run on a GPU by this project",
    )

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        with importing(self.name, "flash-attn 2.7 or newer", *self.capabilities.requirements):
            from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
        self._varlen, self._decode = flash_attn_varlen_func, flash_attn_with_kvcache

    def plan(self, batch: Batch, pool: KVPool) -> FlashAttnPlan:
        longest_query = max(batch.query_lens_host, default=0)
        # In decode the kernel takes the page table's width as the longest length, which a captured graph may keep.
        width = batch.page_table.shape[1] * pool.page_size
        longest = width if batch.mode is ForwardMode.DECODE else max(batch.seq_lens_host, default=0)
        return FlashAttnPlan(batch, pool, _layers(pool), longest_query, longest)

    def plan_in_graph(self, plan: FlashAttnPlan) -> None:
        if plan.batch.mode is not ForwardMode.DECODE:
            plan.key_starts = key_starts(plan.batch)

    def forward_decode(self, plan: FlashAttnPlan, call: AttentionCall) -> None:
        batch, layer = plan.batch, plan.layers[call.layer_id]
        query = for_kernel(call.query[: batch.num_tokens], layer.key.dtype)
        output, lse = self._decode(
            query[:, None], layer.key, layer.value, cache_seqlens=batch.seq_lens, block_table=batch.page_table,
            return_softmax_lse=True, **layer.settings,
        )  # fmt: skip
        self._finish(plan, call, output[:, 0], lse[..., 0])

    def forward_extend(self, plan: FlashAttnPlan, call: AttentionCall) -> None:
        batch, layer = plan.batch, plan.layers[call.layer_id]
        if not batch.num_requests:
            return
        query = for_kernel(call.query[: batch.num_tokens], layer.key.dtype)  # the kernel wants one row per request if all have one token
        output, lse, _ = self._varlen(
            query, layer.key, layer.value, batch.query_start, plan.key_starts, plan.longest_query, plan.longest,
            block_table=batch.page_table, return_attn_probs=True, **layer.settings,
        )  # fmt: skip
        self._finish(plan, call, output, lse.t())

    def _finish(self, plan: FlashAttnPlan, call: AttentionCall, output: Tensor, lse: Tensor) -> None:
        wanted = call.sinks is not None or call.lse_out is not None
        finish(call, output, _log_sum_exp(plan, call, lse) if wanted else None, plan.batch.num_tokens, call.sinks)


def _layer(pool: KVPool, index: int, spec: AttentionSpec) -> Layer:
    if spec.alibi_slopes is not None and not spec.causal and spec.by_backend:
        where = f"layer {index}" + (f" ({spec.module})" if spec.module else "")
        raise UnsupportedError(
            f"{where} is bidirectional with ALiBi, where flash-attn computes -slope * |i - j|, not slope * (j - i); "
            "take another backend, such as 'triton'"
        )
    slopes = slopes_of(spec, pool.device)
    settings = {
        "softmax_scale": spec.scale,
        "causal": spec.causal,
        "window_size": window_of(spec),
        "softcap": spec.softcap or 0.0,
        "alibi_slopes": slopes,
    }
    return Layer(pool.key(index), pool.value(index), slopes, settings)


def _log_sum_exp(plan: FlashAttnPlan, call: AttentionCall, lse: Tensor) -> Tensor:
    """lse [rows, q_heads] as the kernel returns it -> log-sum-exp of the scores."""
    slopes, window = plan.layers[call.layer_id].slopes, call.spec.sliding_window
    by_key = slopes is not None and (window is None or window - 1 >= plan.longest)  # the kernel drops a window that wide
    return lse - slopes * plan.batch.positions[: plan.batch.num_tokens, None] if slopes is not None and by_key else lse
