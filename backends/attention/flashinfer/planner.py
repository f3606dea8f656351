"""Makes FlashInfer's wrappers and plans them: the only file that knows the arguments of their constructors and of `plan`.

`plan` gets host tensors, from which it copies to the device without waiting; with device tensors it would read them back and stop the host.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.backends.attention.flashinfer.choose import LATENT_ITEMS, PrefillKernel, latent_items, uses_tensor_cores, workspace_bytes
from paged_attn.backends.attention.flashinfer.kinds import Kind
from paged_attn.backends.attention.flashinfer.launches import LatentLaunch, Launch
from paged_attn.backends.attention.flashinfer.tables import Tables
from paged_attn.backends.attention.flashinfer.wrappers import Slot, WrapperPool, announce
from paged_attn.backends.devices import architecture_of
from paged_attn.backends.needs import short_dtype

LAYOUT = "NHD"


class GraphBuffers:
    """The int32 device buffers that a captured graph reads: their addresses never change.

    qo_indptr_buf, kv_indptr_buf [requests + 1]; last_page_len_buf, kv_len_buf [requests]; kv_indices_buf [pages], of all requests together.
    """

    def __init__(self, requests: int, pages: int, device: torch.device) -> None:
        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.requests = requests
        self.qo_indptr_buf, self.kv_indptr_buf = zeros(requests + 1), zeros(requests + 1)
        self.last_page_len_buf, self.kv_len_buf, self.kv_indices_buf = zeros(requests), zeros(requests), zeros(pages)


class Planner:
    """Plans launches on one device for pools of one page size and dtype (queries and outputs have it too)."""

    def __init__(self, module: ModuleType, wrappers: WrapperPool, device: torch.device, dtype: torch.dtype, page_size: int) -> None:
        self._module, self._wrappers = module, wrappers
        self._device, self._dtype, self._page_size = device, dtype, page_size
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

    def decode(self, kind: Kind, tables: Tables, owner: object) -> Launch:
        """One query per request. Layers with sinks run on "fa2", the only kernel with a variant for them."""
        if kind.has_sinks:
            return self.prefill(kind, tables, owner, "fa2")
        key = ("decode", kind, self._dtype)
        slot = self._wrappers.take(key, owner, self._device, lambda: self.make_decode(kind, None))
        self.plan_decode(slot, kind, tables)
        return Launch(slot.wrapper, kind)

    def prefill(self, kind: Kind, tables: Tables, owner: object, kernel: PrefillKernel, causal: bool | None = None) -> Launch:
        """Any queries on the pool's pages. `causal` overrides the kind's, for a prefix that every query sees whole."""
        key = ("paged", kernel, kind, self._dtype)
        slot = self._wrappers.take(key, owner, self._device, lambda: self.make_prefill(kind, kernel, None))
        self.plan_prefill(slot, kind, tables, kind.causal if causal is None else causal)
        return Launch(slot.wrapper, kind, any_strides=kernel == "fa3")

    def ragged(self, kind: Kind, tables: Tables, owner: object, kernel: PrefillKernel) -> Launch:
        """Queries on the step's own K and V, for requests with nothing cached."""

        def make() -> Any:
            self._announce(kernel, kind)
            return self._module.BatchPrefillWithRaggedKVCacheWrapper(self._workspace(kind), LAYOUT, backend=kernel)

        slot = self._wrappers.take(("ragged", kernel, kind, self._dtype), owner, self._device, make)
        slot.plan(
            tables.qo_indptr, tables.qo_indptr, kind.num_q_heads, kind.num_kv_heads, kind.head_dim,
            causal=kind.causal, **self._common(kind),
        )  # fmt: skip
        return Launch(slot.wrapper, kind, ragged=True, any_strides=kernel == "fa3")

    def latent(self, kind: Kind, tables: Tables, owner: object, causal: bool) -> LatentLaunch:
        """Any queries on rows of latents; `causal` matters only for requests with several."""
        slot = self._wrappers.take(("latent", kind, self._dtype), owner, self._device, lambda: self.make_latent(kind, None))
        self.plan_latent(slot, kind, tables, causal)
        return LatentLaunch(slot.wrapper, kind)

    def make_decode(self, kind: Kind, buffers: GraphBuffers | None) -> Any:
        self._announce("fa2" if uses_tensor_cores(kind) else "decode", kind)
        graph: dict[str, Any] = {}
        if buffers is not None:
            graph = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": buffers.kv_indptr_buf,
                "paged_kv_indices_buffer": buffers.kv_indices_buf,
                "paged_kv_last_page_len_buffer": buffers.last_page_len_buf,
            }
        return self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace(kind, buffers), LAYOUT, use_tensor_cores=uses_tensor_cores(kind), **graph
        )

    def make_prefill(self, kind: Kind, kernel: PrefillKernel, buffers: GraphBuffers | None) -> Any:
        self._announce(kernel, kind)
        options: dict[str, Any] = {}
        if buffers is not None:
            options = {
                "use_cuda_graph": True,
                "qo_indptr_buf": buffers.qo_indptr_buf,
                "paged_kv_indptr_buf": buffers.kv_indptr_buf,
                "paged_kv_indices_buf": buffers.kv_indices_buf,
                "paged_kv_last_page_len_buf": buffers.last_page_len_buf,
            }
        if kind.has_sinks:
            options |= _sink_variant(kind, kernel, self._dtype)
        return self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace(kind, buffers), LAYOUT, backend=kernel, **options)

    def make_latent(self, kind: Kind, buffers: GraphBuffers | None) -> Any:
        kernel = "fa3" if architecture_of(self._device) == 90 else "fa2"
        announce(f"{kernel} latent", f"rows of {kind.rank} + {kind.head_dim - kind.rank}", short_dtype(self._dtype))
        graph: dict[str, Any] = {}
        if buffers is not None:
            graph = {
                "use_cuda_graph": True,
                "qo_indptr": buffers.qo_indptr_buf,
                "kv_indptr": buffers.kv_indptr_buf,
                "kv_indices": buffers.kv_indices_buf,
                "kv_len_arr": buffers.kv_len_buf,
            }
        return self._module.mla.BatchMLAPagedAttentionWrapper(self._workspace(kind, buffers), backend=kernel, **graph)

    def plan_decode(self, slot: Slot, kind: Kind, tables: Tables) -> None:
        slot.plan(
            tables.kv_indptr, tables.kv_indices, tables.last_page_len,
            kind.num_q_heads, kind.num_kv_heads, kind.head_dim, self._page_size,
            seq_lens=tables.seq_lens, **self._common(kind),
        )  # fmt: skip

    def plan_prefill(self, slot: Slot, kind: Kind, tables: Tables, causal: bool) -> None:
        slot.plan(
            tables.qo_indptr, tables.kv_indptr, tables.kv_indices, tables.last_page_len,
            kind.num_q_heads, kind.num_kv_heads, kind.head_dim, self._page_size,
            causal=causal, seq_lens=tables.seq_lens, max_token_per_sequence=tables.longest_query, **self._common(kind),
        )  # fmt: skip

    def plan_latent(self, slot: Slot, kind: Kind, tables: Tables, causal: bool) -> None:
        """Raises:
        UnsupportedError: more work items than the plan has memory for, which FlashInfer does not check.
        """
        lengths = tables.qo_indptr.diff().tolist()
        if (items := latent_items(kind, lengths, self.num_sms)) > LATENT_ITEMS:
            raise UnsupportedError(
                f"flashinfer plans at most {LATENT_ITEMS} work items for latents; {sum(lengths)} tokens of {kind.num_q_heads} heads in one "
                f"step may be {items}: lower max_batch_tokens, or take another backend"
            )
        slot.plan(
            tables.qo_indptr, tables.kv_indptr, tables.kv_indices, tables.seq_lens.as_subclass(Tensor),
            kind.num_q_heads, kind.rank, kind.head_dim - kind.rank, self._page_size,
            causal, kind.scale, self._dtype, self._dtype,
        )  # fmt: skip

    def _common(self, kind: Kind) -> dict[str, Any]:
        return {
            "sm_scale": kind.scale,
            "window_left": kind.window_left,
            "logits_soft_cap": kind.softcap or None,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }

    def _workspace(self, kind: Kind, buffers: GraphBuffers | None = None) -> Tensor:
        return self._wrappers.workspace(self._device, workspace_bytes(kind, self.num_sms, 0 if buffers is None else buffers.requests))

    def _announce(self, kernel: str, kind: Kind) -> None:
        flags = [word for word, on in (("window", kind.window_left >= 0), ("softcap", kind.softcap > 0), ("sinks", kind.has_sinks)) if on]
        announce(kernel, f"head dim {kind.head_dim}", short_dtype(self._dtype), *flags)


def _sink_variant(kind: Kind, kernel: PrefillKernel, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments that make FlashInfer compile its attention-sink variant.

    Its own `BatchAttentionWithAttentionSinkWrapper` leaves the head dim out of the module's name, so two head dims would share one
    library; this name contains it.
    """
    from flashinfer.jit.attention.variants import attention_sink_decl

    windowed = kind.window_left >= 0
    name = f"paged_attn_sink_{kernel}_{short_dtype(dtype)}_dim_{kind.head_dim}_swa_{windowed}"
    tensors, scalars = (["sink"], ["float"]), (["sm_scale"], ["double"])
    return {
        "jit_args": [
            name, dtype, dtype, dtype, torch.int32, kind.head_dim, kind.head_dim, *tensors, *scalars, "AttentionSink",
            attention_sink_decl[kernel],
        ],
        "jit_kwargs": {"use_sliding_window": windowed, "use_fp16_qk_reduction": False, "pos_encoding_mode": 0},
    }  # fmt: skip
