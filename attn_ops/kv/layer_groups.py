"""Which layers share a page table: those that must keep the same tokens, in groups of equal bytes per page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import LatentSpec

MOST_GROUPS = 8  # each group costs a page table, and a plan in every step
LENGTH = 16_384  # tokens of the request for which groups are chosen, unless the model's limit is lower
WORTH_IT = 0.9  # groups must take at most this share of the bytes of a single group

Position = TypeVar("Position", int, NDArray[np.int64], Tensor)


@dataclass(frozen=True)
class Retention:
    """What a layer must keep: the last `window` tokens, those of the last `chunk`, both conditions, or (with neither) all tokens."""

    window: int | None = None
    chunk: int | None = None

    @property
    def keeps_all(self) -> bool:
        return self.window is None and self.chunk is None

    @property
    def span(self) -> int:
        """The most tokens that a query sees, if not all are kept."""
        return min(each for each in (self.window, self.chunk) if each is not None)

    def first(self, position: Position) -> Position:
        """The first token that queries at `position` (one or many) and later may see."""
        limits = [position * 0]
        if self.window is not None:
            limits.append(position - (self.window - 1))
        if self.chunk is not None:
            limits.append(position // self.chunk * self.chunk)
        return max(limits) if isinstance(position, int) else reduce(lambda one, other: one.clip(min=other), limits)

    def tokens(self, length: int, step: int = 1) -> int:
        """The most of a request's `length` tokens that are kept, if steps compute `step` tokens."""
        return length if self.keeps_all else min(length, self.span - 1 + step)

    def pages(self, length: int, page_size: int, step: int = 1) -> int:
        """The most pages that hold those, wherever in a page they begin."""
        all_pages = -(-length // page_size)
        return all_pages if self.keeps_all else min(all_pages, -(-self.tokens(length, step) // page_size) + 1)

    def describe(self) -> str:
        """`all tokens`, `window 1024`, `chunk 8192`."""
        limits = [f"{name} {value}" for name, value in (("window", self.window), ("chunk", self.chunk)) if value is not None]
        return ", ".join(limits) or "all tokens"


@dataclass(frozen=True)
class LayerGroup:
    """Layers (ids, ascending) that share a page table, and what they keep."""

    layers: tuple[int, ...]
    keeps: Retention

    def elements(self, specs: Sequence[AttentionSpec]) -> int:
        """Elements of the pool that one token takes in these layers."""
        return sum(specs[i].kv_elements for i in self.layers if specs[i].kv_layer == i)

    def specs(self, specs: Sequence[AttentionSpec]) -> tuple[AttentionSpec, ...]:
        """The specs of the group in order, with `kv_layer` as an index into the group."""
        place = {layer: index for index, layer in enumerate(self.layers)}
        return tuple(replace(specs[i], kv_layer=place[specs[i].kv_layer]) for i in self.layers)


def group_layers(specs: Sequence[AttentionSpec], longest: int | None, page_size: int) -> tuple[LayerGroup, ...]:
    """The groups with which a request of `longest` tokens (None: no limit), up to LENGTH, takes the fewest bytes; on ties, the fewest
    groups. Empty if that saves less than a tenth: then all layers share a table and keep all tokens.

    Every group's page takes as many bytes as the largest group's, so that any page of the pool suits any group. Layers with the same
    retention are distributed in order over groups of that size. Models with latents, recomputed or bidirectional layers have no groups.
    """
    if not all(spec.by_backend and spec.causal and not isinstance(spec, LatentSpec) for spec in specs):
        return ()
    length = LENGTH if longest is None else min(longest, LENGTH)
    kinds = _by_retention(specs)
    whole = sum(spec.kv_elements for i, spec in enumerate(specs) if spec.kv_layer == i) * -(-length // page_size)
    best: tuple[LayerGroup, ...] = ()
    least = whole * WORTH_IT
    for size in sorted({_size(specs, families, parts) for families in kinds.values() for parts in range(1, MOST_GROUPS + 1)}, reverse=True):
        groups = tuple(g for keeps, families in kinds.items() for g in _packed(specs, keeps, families, size))
        cost = max(g.elements(specs) for g in groups) * sum(g.keeps.pages(length, page_size) for g in groups)
        if len(groups) <= MOST_GROUPS and cost < least:
            best, least = groups, cost
    return best


def page_bytes_ratio(specs: Sequence[AttentionSpec], groups: Sequence[LayerGroup]) -> tuple[int, int]:
    """Elements of a token in all layers and in the largest group: the ratio of page sizes without and with groups."""
    everything = sum(spec.kv_elements for i, spec in enumerate(specs) if spec.kv_layer == i)
    return everything, max((group.elements(specs) for group in groups), default=everything)


def _by_retention(specs: Sequence[AttentionSpec]) -> dict[Retention, list[list[int]]]:
    """Families of layers by what they keep. A family is a layer and those that read its KV; it keeps what any of them needs."""
    families: dict[int, list[int]] = {}
    for index, spec in enumerate(specs):
        families.setdefault(spec.kv_layer, []).append(index)
    kinds: dict[Retention, list[list[int]]] = {}
    for family in families.values():
        kinds.setdefault(_widest([specs[index] for index in family]), []).append(family)
    return dict(sorted(kinds.items(), key=lambda kind: not kind[0].keeps_all))


def _widest(specs: Sequence[AttentionSpec]) -> Retention:
    windows, chunks = [spec.sliding_window for spec in specs], [spec.chunk if spec.chunk_part == "intra" else None for spec in specs]
    window = None if None in windows else max(window for window in windows if window is not None)
    return Retention(window, chunks[0] if len(set(chunks)) == 1 else None)


def _size(specs: Sequence[AttentionSpec], families: Sequence[list[int]], parts: int) -> int:
    """Elements of a token in the largest of `parts` equal parts of some layers."""
    return sum(specs[family[0]].kv_elements for family in families[: -(-len(families) // parts)])


def _packed(specs: Sequence[AttentionSpec], keeps: Retention, families: Sequence[list[int]], size: int) -> list[LayerGroup]:
    """As few groups as hold the layers in order, of at most `size` or one layer each, and as even as possible."""
    filled: list[list[int]] = []
    left = 0
    for family in families:
        elements = specs[family[0]].kv_elements
        if elements > left:
            filled.append([])
            left = size
        filled[-1] += family
        left -= elements
    return [LayerGroup(tuple(sorted(layers)), keeps) for layers in filled]
