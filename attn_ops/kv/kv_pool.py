"""The paged KV memory of one model: one allocation, page-major, K and V of a layer adjacent within a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paged_attn.attn_ops.kv.layer_groups import LayerGroup, page_bytes_ratio
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import LatentSpec

Made = TypeVar("Made")


class KVPool:
    """`num_pages` pages of `page_size` tokens for every layer that owns KV; page 0 is reserved for padded rows.

    For each such layer, a page holds K [page_size, kv_heads, qk_head_dim] and then V [page_size, kv_heads, v_head_dim]; for a layer with a
    latent, only one row per token [page_size, 1, qk_head_dim], whose first v_head_dim elements are `value(i)`.
    `key(i)` and `value(i)` are views [num_pages, page_size, kv_heads, head_dim] with the page stride of the whole allocation.
    With groups of layers a page holds the layers of one group, so layers of different groups use the same bytes in different pages.

    Args:
        layers: one spec per attention layer, in layer-id order; none for a model with only recurrent layers, whose pages hold nothing.
        num_pages: including page 0, so that `num_pages - 1` are usable.
        dtype: KV element type; usually the model's.
        groups: groups of layers with their own page tables (`group_layers`); empty: one table for all layers.
        within: a pool whose memory and pages this one shares, for some of its layers.

    Attributes:
        parts: for each group, a pool of only its layers, numbered from 0, in the same memory.

    Raises:
        ValueError: fewer than two pages, a page size below 1, or a layer that shares KV it cannot read.
    """

    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        groups: Sequence[LayerGroup] = (),
        within: KVPool | None = None,
    ) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                "a KV pool needs at least 2 pages (page 0 is reserved) and a page_size of at least 1; "
                f"got num_pages={num_pages}, page_size={page_size}"
            )
        self.layers = tuple(layers)
        self.num_pages, self.page_size = num_pages, page_size
        self.groups = tuple(groups)
        if within is None:
            self.page_elements = page_elements(self.layers, page_size, groups)
            self.storage = torch.zeros(num_pages * self.page_elements, dtype=dtype, device=device)
        else:
            self.page_elements, self.storage = within.page_elements, within.storage
        self._divide()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the views out; they are recreated, because copies of them would each hold all memory and no longer share it."""
        return {name: value for name, value in vars(self).items() if name not in ("parts", "_keys", "_values")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._divide()

    def _divide(self) -> None:
        """Makes the views of the memory."""
        about = self.num_pages, self.page_size, self.dtype, self.device
        self.parts = tuple(KVPool(group.specs(self.layers), *about, within=self) for group in self.groups)
        if self.groups:
            found = {layer: (part, index) for g, part in zip(self.groups, self.parts, strict=True) for index, layer in enumerate(g.layers)}
            where = [found[layer] for layer in range(len(self.layers))]
            self._keys, self._values = [part.key(i) for part, i in where], [part.value(i) for part, i in where]
        else:
            self._keys, self._values = self._views()

    def release(self) -> None:
        """Free the memory even if views of it remain; they must not be used afterwards."""
        self.storage.untyped_storage().resize_(0)

    def _views(self) -> tuple[list[Tensor], list[Tensor]]:
        keys: list[Tensor] = []
        values: list[Tensor] = []
        offset = 0
        for index, spec in enumerate(self.layers):
            if spec.kv_layer != index:
                _check_shared(self.layers, index)
                keys.append(keys[spec.kv_layer])
                values.append(values[spec.kv_layer])
                continue
            key = self._view(spec.num_kv_heads, spec.qk_head_dim, offset)
            if isinstance(spec, LatentSpec):
                value = key[..., : spec.v_head_dim]
            else:
                value = self._view(spec.num_kv_heads, spec.v_head_dim, offset + key[0].numel())
            keys.append(key)
            values.append(value)
            offset += self.page_size * spec.kv_elements
        return keys, values

    def _view(self, heads: int, dim: int, offset: int) -> Tensor:
        shape = (self.num_pages, self.page_size, heads, dim)
        return self.storage.as_strided(shape, (self.page_elements, heads * dim, dim, 1), offset)

    def key(self, layer_id: int) -> Tensor:
        """K of a layer: [num_pages, page_size, kv_heads, qk_head_dim]."""
        return self._keys[layer_id]

    def value(self, layer_id: int) -> Tensor:
        """V of a layer: [num_pages, page_size, kv_heads, v_head_dim]."""
        return self._values[layer_id]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def nbytes(self) -> int:
        return self.storage.numel() * self.storage.element_size()


def page_elements(layers: Sequence[AttentionSpec], page_size: int, groups: Sequence[LayerGroup] = ()) -> int:
    """Elements in one page over all layers that own KV, or over those of the largest group."""
    return page_size * page_bytes_ratio(layers, groups)[1]


def _check_shared(layers: Sequence[AttentionSpec], index: int) -> None:
    spec, where = layers[index], f"layer {index}" + (f" ({layers[index].module})" if layers[index].module else "")
    if not 0 <= spec.kv_layer < index:
        raise ValueError(f"{where} reads the KV of layer {spec.kv_layer}; allowed are its own id and those of earlier layers")
    owner = layers[spec.kv_layer]
    mine, theirs = ((s.num_kv_heads, s.qk_head_dim, s.v_head_dim) for s in (spec, owner))
    if mine != theirs:
        raise ValueError(f"{where} expects KV heads, qk and v dims {mine}, but layer {spec.kv_layer}, whose KV it reads, has {theirs}")


def once_per_pool(make: Callable[[KVPool], Made]) -> Callable[[KVPool], Made]:
    """A function that calls `make` once for each pool, and keeps the result, which must not hold the pool, while the pool lives."""
    made: WeakKeyDictionary[KVPool, Made] = WeakKeyDictionary()

    def get(pool: KVPool) -> Made:
        if pool not in made:
            made[pool] = make(pool)
        return made[pool]

    return get
