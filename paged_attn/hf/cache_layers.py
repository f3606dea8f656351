"""The layers of a `PagedCache`: what transformers calls, on one page table for all of them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.hf.shared_table import SharedTable


class PagedLayer(CacheLayerMixin):
    """One layer's view of the table. The cache, not the layer, moves and crops rows: pages hold all layers.

    Args:
        kv: its index in the pool, or None for a layer that keeps nothing (it reads another layer's K and V).
        window: transformers' sliding_window: `update` returns the new tokens and the `window - 1` before them.
        where: the layer's name, for messages.
    """

    is_croppable = True

    def __init__(self, table: SharedTable, kv: int | None, window: int | None, where: str) -> None:
        self.table, self.kv, self.where = table, kv, where
        self.sliding_window, self.is_sliding = window, window is not None
        self.length = 0

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether it keeps something now."""
        return self.length > 0

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """K of all stored tokens, [rows, heads, tokens, dim], gathered; None before the first."""
        return self._gather(self.table.kept_from)[0] if self.length and self.kv is not None else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self._gather(self.table.kept_from)[1] if self.length and self.kv is not None else None

    @property
    def record_past(self) -> bool:
        return self.table.recording

    @record_past.setter
    def record_past(self, on: bool) -> None:
        self.table.recording = on

    def activate_past_recording(self) -> None:
        self.table.recording = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the pool was created with the cache."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the new K [rows, heads, new, qk_dim] and V into pages; returns all K and V that the new tokens may see."""
        kv = self._check(key_states, value_states)
        start, new = self.length, key_states.shape[2]
        self.table.prepare(key_states.shape[0], start, start + new)
        self.table.write(kv, start, key_states, value_states)
        self.length = start + new
        return (key_states, value_states) if start == 0 else self._gather(self._first_visible(start))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first_visible(self.length)
        return self.length + query_length - first, first

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def reset(self) -> None:
        self.length = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("the rows of a single layer cannot be moved; call reorder_cache of the PagedCache")

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("a single layer cannot be cropped; call crop of the PagedCache")

    def _first_visible(self, start: int) -> int:
        return 0 if self.sliding_window is None else max(start - self.sliding_window + 1, 0)

    def _gather(self, first: int) -> tuple[Tensor, Tensor]:
        assert self.kv is not None
        return self.table.gather(self.kv, first, self.length)

    def _check(self, keys: Tensor, values: Tensor) -> int:
        pool = self.table.pages.pool
        if self.kv is None:
            raise UnsupportedError(
                f"{self.where} kept no K and V when this PagedCache was made, but does now; make it for the model that generates"
            )
        want = [(pool.dtype, pool.device, of(self.kv).shape[2:]) for of in (pool.key, pool.value)]
        got = [(t.dtype, t.device, torch.Size((t.shape[1], t.shape[3]))) for t in (keys, values)]
        if got != want:
            raise UnsupportedError(
                f"{self.where} gave K and V of (dtype, device, heads and dim) {got}, but this PagedCache was made for {want}; "
                "make it for the model that generates; without torch.autocast, under which K and V may differ: load the model in the dtype "
                "in which it computes"
            )
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise UnsupportedError(f"{self.where}: a PagedCache keeps no gradients; call the model under torch.no_grad(), as generate does")
        return self.kv


class PagedHybridLayer(PagedLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """Pages for the attention of a layer that also has a recurrent state, which transformers stores."""

    def __init__(self, table: SharedTable, kv: int | None, where: str, number_of_states: int) -> None:
        PagedLayer.__init__(self, table, kv, None, where)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        forget_state(self)
        PagedLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders only the state; the cache moves the pages."""
        LinearAttentionLayer.reorder_cache(self, cast(Any, beam_idx))

    def crop(self, tokens_to_remove: int) -> None:
        """Crops only the state; the cache crops the pages."""
        LinearAttentionLayer.crop(self, tokens_to_remove)


def forget_state(layer: Any) -> None:
    """Reinitializes a recurrent layer, as transformers' own reset keeps the number of rows. Does nothing to other layers."""
    if isinstance(layer, LinearAttentionLayer):
        recording = layer.record_past
        LinearAttentionLayer.__init__(layer, number_of_states=layer.number_of_states)
        layer.record_past = recording
