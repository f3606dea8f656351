"""PyTorch's flex_attention: masks, windows, chunks, biases as functions that are compiled into the kernel.

The keys and values that a step's queries may see are gathered from their pages for each layer. Reading the pages in place, with a
block of the mask per page, is not sound with torch 2.11 to 2.13: flex's Triton kernels compute a key's offset in 32 bits, which pools of
2**31 elements silently overflow (pytorch#190857, vllm#50427; all layers share our pool); they multiply unused slots of a page by zero,
which leaves NaN as NaN; and blocks of fewer than 16 keys do not compile.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool, once_per_pool
from paged_attn.attn_ops.replaced_entries import replaced_entries
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionCall, StoringBackend, slopes_of
from paged_attn.backends.attention.capabilities import Capabilities, Feature, Span
from paged_attn.backends.attention.flash_style import finish
from paged_attn.backends.attention.flex.mods import Formula, attend, compiled
from paged_attn.backends.attention.flex.step import Keys, Tiles
from paged_attn.backends.needs import UP_TO_FLOAT32

MOST_ELEMENTS = 1 << 31  # of the gathered keys or values: the kernels' offsets have 32 bits
_slopes = once_per_pool(lambda pool: [slopes_of(spec, pool.device) for spec in pool.layers])
MaskKey = tuple[bool, int | None, int | None]


@dataclass(slots=True)
class FlexPlan:
    batch: Batch
    pool: KVPool
    slopes: list[Tensor | None]
    tiles: Tiles | None = None
    keys: dict[MaskKey, Keys] = field(default_factory=dict)


class FlexBackend(StoringBackend):
    name = "flex"
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=UP_TO_FLOAT32,
        kv_dtypes=UP_TO_FLOAT32,
        features=frozenset(
            {Feature.WINDOW, Feature.CHUNK, Feature.SOFTCAP, Feature.SINKS, Feature.ALIBI, Feature.POSITION_BIAS, Feature.BIDIRECTIONAL,
             Feature.LSE, Feature.UNEQUAL_DIMS}
        ),
        head_dims=Span(16, 256),
        note="flex_attention, compiled on a GPU; gathers keys and values from their pages for each layer, because its kernels cannot "
        "read a large pool in place; sinks are applied after the kernel; on a CPU it runs uncompiled, to check results",
    )  # fmt: skip

    def plan(self, batch: Batch, pool: KVPool) -> FlexPlan:
        return FlexPlan(batch, pool, _slopes(pool))

    def plan_in_graph(self, plan: FlexPlan) -> None:
        if not plan.batch.num_requests:
            return
        plan.tiles = Tiles.of(plan.batch)
        for spec in plan.pool.layers:
            if spec.by_backend and (kind := _kind(spec)) not in plan.keys:
                plan.keys[kind] = Keys.of(plan.batch, plan.tiles, spec)

    def forward_extend(self, plan: FlexPlan, call: AttentionCall) -> None:
        tiles = plan.tiles
        if tiles is None:
            return
        keys = plan.keys[_kind(call.spec)]
        formula = Formula.of(call.spec, tiles.size, lse=call.lse_out is not None or call.sinks is not None)
        arguments = (
            call.query[tiles.query_row].transpose(0, 1)[None],
            _gathered(plan.pool.key(call.layer_id), keys, call.query.dtype),
            _gathered(plan.pool.value(call.layer_id), keys, call.query.dtype),
            keys.where,
            plan.slopes[call.layer_id],
            None if call.bias is None else call.bias.float(),
        )
        if call.query.is_cuda:
            output, lse = compiled(formula, *arguments)
        else:
            with _uncompiled():
                output, lse = attend(formula, *arguments)
        rows, row_lse = output[0].transpose(0, 1)[tiles.back], None if lse is None else lse[0].t()[tiles.back]
        finish(call, rows, row_lse, plan.batch.num_tokens, call.sinks)


def _kind(spec: AttentionSpec) -> MaskKey:
    return spec.causal, spec.sliding_window, spec.chunk


def _gathered(cache: Tensor, keys: Keys, dtype: torch.dtype) -> Tensor:
    """cache [pages, page_size, kv_heads, dim] -> [1, kv_heads, N, dim]."""
    elements = keys.pages.shape[0] * cache.shape[2] * cache.shape[3]
    if elements >= MOST_ELEMENTS:
        raise UnsupportedError(
            f"flex_attention would read {keys.pages.shape[0]:,} keys of {cache.shape[2]} x {cache.shape[3]} in one step, {elements:,} "
            f"elements; its kernels can address fewer than {MOST_ELEMENTS:,}: run fewer requests at a time or another backend"
        )
    return cache[keys.pages, keys.offsets].to(dtype).transpose(0, 1)[None]


def _uncompiled() -> AbstractContextManager[None]:
    """Runs flex_attention as plain operations; by default it compiles itself at each call, even without torch.compile."""
    from torch.nn.attention import flex_attention as module

    return replaced_entries(vars(module), {"_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True})
