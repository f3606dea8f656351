"""The layers of a `PagedCache`, and finding out by one token what each layer of a model keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.spec import AttentionSpec
from paged_attn.passes.model_facts import model_device
from paged_attn.shared_table import SharedTable

_HYBRID = cache_utils.LinearAttentionAndFullAttentionLayer
# Layers that keep no K and V: their state is of fixed size (or none), and stays as transformers has it.
_UNPAGED = tuple(kind for name in ("LinearAttentionLayer", "DummyLayer") if (kind := getattr(cache_utils, name, None)) is not None)


class PagedLayer(CacheLayerMixin):
    """One layer's view of the table. The cache, not the layer, moves and crops rows: pages hold all layers.

    Args:
        kv: its number in the pool, or None for a layer that keeps nothing (it reads the K and V of another one).
        window: what transformers calls sliding_window: `update` returns the new tokens and `window - 1` before them.
        where: of the layer, for messages.
    """

    is_croppable = True

    def __init__(self, table: SharedTable, kv: int | None, window: int | None, where: str) -> None:
        self.table, self.kv, self.where = table, kv, where
        self.sliding_window, self.is_sliding = window, window is not None
        self.length = 0
        self.is_initialized = True

    @property
    def keys(self) -> Tensor | None:
        """K of all tokens that are there, [rows, heads, tokens, dim], gathered; None before the first."""
        return self._gather(self.table.kept_from)[0] if self.length and self.kv is not None else None

    @property
    def values(self) -> Tensor | None:
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
        """Nothing to do: the pool was made with the cache."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the new K [rows, heads, new, qk_dim] and V into pages; returns those that the new tokens may see, with them."""
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
        raise NotImplementedError("the rows of one layer can not be moved alone; call reorder_cache of the PagedCache")

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("one layer can not be cropped alone; call crop of the PagedCache")

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
                "make it for the model that generates, under the same autocast"
            )
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise UnsupportedError(f"{self.where}: a PagedCache keeps no gradients; call the model under torch.no_grad(), as generate does")
        return self.kv


class PagedHybridLayer(PagedLayer, _HYBRID):  # type: ignore[misc, valid-type]
    """Pages for the attention of a layer that has a recurrent state, too; the state is transformers' own."""

    def __init__(self, table: SharedTable, kv: int | None, where: str, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        PagedLayer.__init__(self, table, kv, None, where)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        PagedLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Of the state alone; the cache moves the pages."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Of the state alone; the cache crops the pages."""
        LinearAttentionLayer.crop(self, tokens_to_remove)


def probe(model: nn.Module) -> DynamicCache:
    """transformers' own cache for the model, after one token: its layers say what they keep.

    Raises:
        UnsupportedError: an encoder-decoder, a model that is called otherwise, or one whose layers keep what pages can not hold.
    """
    config, name = getattr(model, "config", None), type(model).__name__
    if not hasattr(config, "get_text_config"):
        raise UnsupportedError(f"PagedCache needs a transformers PreTrainedModel, got {name}; serve other modules with paged_attn.LLM")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} is an encoder-decoder, and PagedCache is for causal language models; generate without it")
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    token = torch.ones((1, 1), dtype=torch.int64, device=model_device(model))
    try:
        with torch.no_grad():
            model(input_ids=token, past_key_values=cache, use_cache=True)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UnsupportedError(f"{name} could not be run on one token to see what its layers keep: {error}") from error
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, _HYBRID, *_UNPAGED):
            raise UnsupportedError(
                f"layer {index} of {name} keeps its past in a {type(layer).__name__}, and PagedCache knows layers that keep K and V "
                "of every token; generate without it, or serve the model with paged_attn.LLM"
            )
    if not any(_keeps(layer) for layer in cache.layers):
        raise UnsupportedError(f"no layer of {name} keeps K and V in past_key_values, so that there is nothing to page; generate without it")
    return cache


def page_layout(model: nn.Module, cache: DynamicCache) -> tuple[tuple[AttentionSpec, ...], torch.dtype, torch.device]:
    """What a page holds for each layer that keeps K and V, and their common dtype and device.

    Raises:
        UnsupportedError: layers on several devices or in several dtypes, or a layer whose K and V differ in heads.
    """
    name, specs = type(model).__name__, []
    kept = [(index, layer.keys, layer.values) for index, layer in enumerate(cache.layers) if _keeps(layer)]
    kinds = sorted({(str(t.dtype), str(t.device)) for _, *both in kept for t in both})
    if len(kinds) > 1:
        raise UnsupportedError(f"{name} keeps K and V in several dtypes or on several devices: {kinds}; a PagedCache has one pool")
    for index, key, value in kept:
        if key.ndim != 4 or value.ndim != 4 or key.shape[1] != value.shape[1]:
            raise UnsupportedError(
                f"layer {index} of {name} keeps K {tuple(key.shape)} and V {tuple(value.shape)}; pages hold [rows, heads, tokens, dim] "
                "with as many heads in V as in K"
            )
        heads = key.shape[1]
        specs.append(
            AttentionSpec(heads, heads, key.shape[3], value.shape[3], scale=1.0, kv_layer=len(specs), module=f"cache layer {index}")
        )
    return tuple(specs), kept[0][1].dtype, kept[0][1].device


def paged_layers(cache: DynamicCache, table: SharedTable) -> list[Any]:
    """What stands in the PagedCache for each layer of transformers' cache."""
    layers: list[Any] = []
    number = 0
    for index, layer in enumerate(cache.layers):
        where = f"layer {index}"
        kv = number if _keeps(layer) else None
        number += kv is not None
        if type(layer) in _UNPAGED:
            layer.reset()
            layers.append(layer)
        elif type(layer) is _HYBRID:
            layers.append(PagedHybridLayer(table, kv, where, layer.number_of_states))
        else:
            layers.append(PagedLayer(table, kv, getattr(layer, "sliding_window", None), where))
    return layers


def common_window(cache: DynamicCache) -> int | None:
    """The largest window of the layers that keep K and V, or None if one of them sees everything."""
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers if _keeps(layer)]
    return None if None in windows else max(w for w in windows if w is not None)


def _keeps(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None
