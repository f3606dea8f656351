"""What each layer of a Hugging Face model keeps in its cache, found out by running one token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.hf.cache_layers import PagedHybridLayer, PagedLayer, forget_state
from paged_attn.hf.cache_name import CACHE_NAME
from paged_attn.hf.shared_table import SharedTable
from paged_attn.passes.fx.model_facts import model_device

_HYBRID = cache_utils.LinearAttentionAndFullAttentionLayer
# Layers without K and V: their state has a fixed size (or they have none) and is left to transformers. 5.17 has no DummyLayer.
_UNPAGED = tuple(kind for name in ("LinearAttentionLayer", "DummyLayer") if (kind := getattr(cache_utils, name, None)) is not None)


def probe(model: nn.Module) -> DynamicCache:
    """transformers' own cache for the model after one token, whose layers show what they keep. Raises UnsupportedError: an encoder-decoder,
    a model with another signature, or a layer that keeps something that pages cannot hold."""
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise UnsupportedError(f"PagedCache needs a transformers PreTrainedModel, got {name}; serve other modules with paged_attn.LLM")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} is an encoder-decoder, and PagedCache is for causal language models; generate without it")
    token = torch.ones((1, 1), dtype=torch.int64, device=model_device(model))
    what = f"{name} could not be run on one token with a DynamicCache, to see what its layers keep"
    with model_code(lambda why: UnsupportedError(f"{what}: {why}")), torch.no_grad():
        cache = DynamicCache(config=config.get_text_config(decoder=True))
        model(input_ids=token, use_cache=True, **{CACHE_NAME: cache})
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, _HYBRID, *_UNPAGED):
            raise UnsupportedError(
                f"layer {index} of {name} keeps its past in a {type(layer).__name__}, and PagedCache knows layers that keep K and V "
                "of every token; generate without it, or serve the model with paged_attn.LLM"
            )
    if not any(_keeps(layer) for layer in cache.layers):
        raise UnsupportedError(f"no layer of {name} keeps K and V in its cache, so that there is nothing to page; generate without it")
    return cache


def page_layout(model: nn.Module, cache: Any) -> tuple[tuple[AttentionSpec, ...], torch.dtype, torch.device]:
    """The spec of each layer that keeps K and V, and their common dtype and device. Raises UnsupportedError: layers on several devices or
    in several dtypes, or a layer whose K and V differ in heads."""
    name = type(model).__name__
    specs: list[AttentionSpec] = []
    kept = [(index, cache.layers[index].keys, cache.layers[index].values) for index in keeping(cache)]
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


def paged_layers(cache: Any, table: SharedTable, ids: list[int]) -> list[Any]:
    """The layers of a PagedCache for those of transformers' cache; `ids`: pool indices of the layers that keep K and V."""
    layers: list[Any] = []
    numbers = iter(ids)
    for index, layer in enumerate(cache.layers):
        where = f"layer {index}"
        kv = next(numbers) if _keeps(layer) else None
        if type(layer) in _UNPAGED:
            forget_state(layer)
            layers.append(layer)
        elif type(layer) is _HYBRID:
            layers.append(PagedHybridLayer(table, kv, where, layer.number_of_states))
        else:
            layers.append(PagedLayer(table, kv, getattr(layer, "sliding_window", None), where))
    return layers


def keeping(cache: Any) -> list[int]:
    """The indices of layers that keep K and V."""
    return [index for index, layer in enumerate(cache.layers) if _keeps(layer)]


def common_window(cache: Any) -> int | None:
    """The largest window of the layers that keep K and V; None if one of them sees everything."""
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers if _keeps(layer)]
    return None if None in windows else max(w for w in windows if w is not None)


def _keeps(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None
