"""FlashAttention 3 as sgl-kernel builds it, called on the page table: one call serves a batch in any mode.

From its sources (sgl-attn, August 2025), whose op schema, messages and kernel symbols agree with the binary of 0.4.2.post2:
- The op is called without its Python wrapper, which costs host time and checks again what a plan already knows.
- `attention_chunk` is Llama 4's chunk: key j is seen from i iff j // chunk == i // chunk, within the window.
- Sinks must be bfloat16 and at most 64 heads: the kernel keeps them in 64 places of shared memory and does not check. Others are
  applied afterwards, through the log-sum-exp. The SM8x kernels silently ignore sinks, so only SM90 is declared.
- Pages whose size is a multiple of the kernel's key block (64 and up) are read by TMA in whole blocks, including unused slots, and
  0 * NaN is NaN. A `leftpad_k` of zeros turns TMA off.
- Latents of 512 with a rotated part of 64: keys are the rotated parts, values the latents, and `q_v` holds queries that are multiplied
  with the values as well, so that a row is read once. No other sizes are accepted; the kernel for them has blocks of 64 keys, too.
- It is not batch-invariant. On an H200 (0.4.2.post2), with num_splits=1, a decode row alone differed bitwise from the same row in a
  batch with long prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.kv.kv_pool import KVPool, once_per_pool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.base import AttentionCall, StoringBackend
from paged_attn.backends.attention.capabilities import DECODE_GRAPHS, Capabilities, Feature, OneOf, Span
from paged_attn.backends.attention.flash_style import check_pool, finish, for_kernel, kernel_takes, scratch_like, window_of
from paged_attn.backends.needs import HALF, SGL_KERNEL, importing

SINK_HEADS = 64
SMALLEST_KEY_BLOCK = 64


@dataclass(slots=True)
class Layer:
    """The arguments of the op that a layer determines: K, V, and `settings`, from the scale to sm_margin.

    `rank`: the first `rank` elements of a query are multiplied with V, the others with K; 0 except for latents.
    """

    key: Tensor
    value: Tensor
    settings: tuple[Any, ...]
    rank: int


@dataclass(slots=True)
class FA3Plan:
    batch: Batch
    pool: KVPool
    layers: list[Layer]
    longest_query: int
    left_pad: Tensor | None


class FA3Backend(StoringBackend):
    name = "fa3"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALF,
        kv_dtypes=HALF,
        features=frozenset(
            {Feature.WINDOW, Feature.CHUNK, Feature.SOFTCAP, Feature.SINKS, Feature.BIDIRECTIONAL, Feature.LSE, Feature.MLA}
        ),
        architectures=frozenset({90}),
        head_dims=Span(8, 256, 8),
        dim_pairs=frozenset({(192, 128), (64, 128), (64, 256), (64, 512)}),
        latent_dims=(OneOf({512}), OneOf({64})),
        graphs=DECODE_GRAPHS,
        # On an H200 (sgl-kernel 0.4.2.post2) rows of a mixed batch were wrong with a window and chunks.
        conflicts=frozenset({frozenset({Feature.WINDOW, Feature.CHUNK})}),
        requirements=(SGL_KERNEL,),
        note="FlashAttention 3 of sgl-kernel; pages of 64 tokens and more are read without TMA",
    )

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        with importing(self.name, "sgl_kernel with FlashAttention 3", *self.capabilities.requirements):
            import sgl_kernel.flash_attn  # noqa: F401 (it registers the op)
        self._forward = torch.ops.sgl_kernel.fwd.default
        self._zeros: list[Tensor] = []  # the last is in use; captured graphs may still use the others

    def plan(self, batch: Batch, pool: KVPool) -> FA3Plan:
        left_pad = self._zeros_for(batch) if pool.page_size >= SMALLEST_KEY_BLOCK else None
        return FA3Plan(batch, pool, _layers(pool), max(batch.query_lens_host, default=0), left_pad)

    def forward_extend(self, plan: FA3Plan, call: AttentionCall) -> None:
        batch, layer, sinks = plan.batch, plan.layers[call.layer_id], call.sinks
        if not batch.num_requests:
            return
        dtype = layer.key.dtype  # also the dtype of q and the output
        in_place = kernel_takes(call.output, dtype)
        output = call.output if in_place else scratch_like(call.output, dtype)
        query, latent_query = for_kernel(call.query, dtype), None
        if layer.rank:
            latent_query, query = query[..., : layer.rank], query[..., layer.rank :]
        in_kernel = sinks is not None and sinks.dtype is torch.bfloat16 and sinks.shape[0] <= SINK_HEADS and sinks.is_contiguous()
        _, lse, _, _ = self._forward(
            query, layer.key, layer.value, None, None, latent_query, output,  # k_new, v_new
            batch.query_start, None, None, None, batch.seq_lens,  # cu_seqlens_k, cu_seqlens_k_new, seqused_q
            plan.longest_query, None, batch.page_table, None, plan.left_pad,  # max_seqlen_k, kv_batch_idx
            None, None, None, None, None, None,  # rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale
            *layer.settings, sinks if in_kernel else None,
        )  # fmt: skip
        late_sinks = None if in_kernel else sinks
        if not in_place or late_sinks is not None or call.lse_out is not None:
            finish(call, None if in_place else output, lse.t(), batch.num_tokens, late_sinks)

    def _zeros_for(self, batch: Batch) -> Tensor:
        """[R] int32 zeros; reused between steps, since a captured graph keeps the address."""
        if not self._zeros or self._zeros[-1].shape[0] < batch.num_requests or self._zeros[-1].device != batch.seq_lens.device:
            self._zeros.append(batch.seq_lens.new_zeros(max(256, 2 * batch.num_requests)))
        return self._zeros[-1][: batch.num_requests]


@once_per_pool
def _layers(pool: KVPool) -> list[Layer]:
    check_pool(pool, FA3Backend.name)
    return [_layer(pool, index, spec) for index, spec in enumerate(pool.layers)]


def _layer(pool: KVPool, index: int, spec: AttentionSpec) -> Layer:
    left, right = window_of(spec)
    chunk = spec.chunk or 0
    rotary_interleaved, metadata, splits, pack_gqa, sm_margin = True, None, 0, None, 0
    settings = (
        spec.scale, spec.causal, left, right, chunk, spec.softcap or 0.0, rotary_interleaved, metadata, splits, pack_gqa, sm_margin,
    )  # fmt: skip
    rank = spec.rank if isinstance(spec, LatentSpec) else 0
    return Layer(pool.key(index)[..., rank:], pool.value(index), settings, rank)
