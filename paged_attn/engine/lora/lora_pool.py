"""Adapters in memory: stacked factors for each place in the graph at fixed addresses, and which slot holds which adapter."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.lora import LoraSite
from paged_attn.engine.lora.adapter_files import ALONE, Adapter, Factors, read_adapter
from paged_attn.shown import shown

logger = logging.getLogger("paged_attn")
NAMED = 3


class _PartOfSite(NamedTuple):
    """Which part of a site a linear layer is, and where its outputs begin."""

    site: int
    part: int
    start: int


@dataclass(frozen=True)
class AdapterNamespace:
    """What requests of one adapter share in the prefix cache, in a namespace that its caller gave. Equal to nothing that callers make."""

    number: int
    given: Hashable


@dataclass(frozen=True)
class Loaded:
    """An adapter that requests may have. `number` is that of no other that ever was in this pool; `source` says where it came from."""

    name: str
    slot: int
    number: int
    source: str

    def namespace(self, given: Hashable) -> Hashable:
        """The namespace in the prefix cache: no KV of other adapters is used, nor of an earlier one of this name."""
        return AdapterNamespace(self.number, given)


class LoraPool:
    """Room for `slots` adapters of a model, of rank `rank` at most.

    Args:
        weights: the tensors that lora sites name, with the spare rows behind them.
        calls: how often a call of the model calls each linear layer.

    Attributes:
        tensors: a, b and scales of each site; unused slots hold zeros.
        inputs: of the graph: all of them but those a that are rows of a weight.
        loaded: by name; another dict after each change, for other threads to read.
    """

    def __init__(
        self, model: nn.Module, sites: Sequence[LoraSite], slots: int, rank: int, device: torch.device, weights: Mapping[int, Tensor],
        calls: Mapping[str, int],
    ) -> None:  # fmt: skip
        self._model = model
        self.sites, self.slots, self.rank = tuple(sites), slots, rank
        self.loaded: dict[str, Loaded] = {}
        self.tensors: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self._count = 0
        self._parts_of: dict[str, list[_PartOfSite]] = {}
        with torch.inference_mode(False):
            for index, site in enumerate(self.sites):
                shapes, outputs = site.shapes(slots, rank), sum(site.rows)
                own = [] if site.weight is None else [weights[site.weight][outputs:].view(shapes[0])]
                made = [
                    torch.zeros(shape, dtype=dtype, device=device)
                    for shape, dtype in list(zip(shapes, (site.dtype, site.dtype, torch.float32), strict=True))[len(own) :]
                ]
                self.tensors += own + made
                self.inputs += made
                start = 0
                for number, part in enumerate(site.parts):
                    self._parts_of.setdefault(part.module, []).append(_PartOfSite(index, number, start))
                    start += part.rows
        self._not_called = {module for module, found in self._parts_of.items() if calls[module] < len(found)}
        self._parts_of = {module: found for module, found in self._parts_of.items() if module not in self._not_called}
        logger.info("room for %d adapters of rank %d: %.0f MiB", slots, rank, self.nbytes / 2**20)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the linear layers that adapters can be added to."""
        return tuple(self._parts_of)

    def factors(self, module: str, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """a [rank, inputs], b [outputs, rank] and the scale [] of a slot at a linear layer, as views."""
        place = self._parts_of[module][0]
        a, b, scales = (tensor[slot] for tensor in self._tensors_of(place))
        first, rows = place.part * self.rank, self.sites[place.site].rows[place.part]
        return a[first : first + self.rank], b[place.start : place.start + rows], scales[place.part]

    def _tensors_of(self, place: _PartOfSite) -> list[Tensor]:
        return self.tensors[3 * place.site : 3 * place.site + 3]

    def of(self, name: str) -> Loaded:
        """Raises ValueError: there is no adapter of that name."""
        if name not in self.loaded:
            known = ", ".join(map(repr, self.loaded)) or "none"
            raise ValueError(f"lora is {shown(name)}; loaded are {known}; load_lora(name, path) loads one")
        return self.loaded[name]

    def load(self, name: str, source: Any) -> Loaded:
        """Read an adapter into a free slot; see `read_adapter`.

        Raises:
            ValueError: the name is in use, no slot is free, the adapter is of a larger rank than there is room for, or its factors are not
                finite.
            UnsupportedError: see `read_adapter`; or the adapter changes what the graph has no linear layer for.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"an adapter's name is {shown(name)}; allowed: a text that is not empty")
        if name in self.loaded:
            raise ValueError(
                f"an adapter {shown(name)} is loaded from {self.loaded[name].source}; unload_lora it first, or choose another name"
            )
        taken = {each.slot for each in self.loaded.values()}
        free = [slot for slot in range(self.slots) if slot not in taken]
        if not free:
            raise ValueError(f"all {self.slots} places for adapters are taken, by {', '.join(self.loaded)}; unload one, or raise max_loras")
        adapter = read_adapter(source, name)
        self._check(adapter)
        with torch.inference_mode(False), torch.no_grad():
            self.clear(free[0])
            for module, factors in adapter.factors.items():
                self.write(free[0], module, factors)
        self._count += 1
        self.loaded = {**self.loaded, name: Loaded(name, free[0], self._count, adapter.source)}
        logger.info("loaded the adapter %s from %s: %d linear layers", name, adapter.source, len(adapter.factors))
        return self.loaded[name]

    def unload(self, name: str) -> None:
        """Raises ValueError: there is none of that name. Nobody may use it any more."""
        gone = self.of(name)
        self.loaded = {each: adapter for each, adapter in self.loaded.items() if adapter is not gone}

    def _check(self, adapter: Adapter) -> None:
        if weights := [module for module in adapter.factors if module in self._not_called]:
            raise UnsupportedError(
                f"{adapter.source} changes {weights[0]}, whose weight this model's own code multiplies with, without calling the layer: "
                "there an adapter of peft adds nothing; train it for other layers"
            )
        if unknown := [module for module in adapter.factors if module not in self._parts_of]:
            more = f" (and {len(unknown) - NAMED} more)" if len(unknown) > NAMED else ""
            kinds = ", ".join(sorted({module.rpartition(".")[2] for module in self._parts_of})) or "none"
            linears = {path for path, module in self._model.named_modules() if isinstance(module, nn.Linear)}
            hint = ". Linears that latent attention has taken in come back with disable_passes=('latent_attention',)"
            raise UnsupportedError(
                f"{adapter.source} changes {', '.join(unknown[:NAMED])}{more}, where the graph of this model has no linear layer of its "
                f"own that adapters can be added to; those that it has are named {kinds}{hint if linears.issuperset(unknown) else ''}"
            )
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, carried in adapter.carried.items():
            mine = parameters.get(name)
            if mine is None or mine.shape != carried.shape or not torch.equal(mine, carried.to(mine.device, mine.dtype)):
                raise UnsupportedError(
                    f"{adapter.source} brings {name} {list(carried.shape)} of its own (modules_to_save, or embeddings that were trained or "
                    f"resized), which is not what the model has; only factors of linear layers can be chosen by request. {ALONE}"
                )
        for module, factors in adapter.factors.items():
            place = self._parts_of[module][0]
            site = self.sites[place.site]
            inputs, outputs, rank = factors.a.shape[1], factors.b.shape[0], factors.a.shape[0]
            if rank > self.rank:
                raise ValueError(f"{adapter.source}: {module} has rank {rank}, and there is room for {self.rank}: raise max_lora_rank")
            if (inputs, outputs) != (site.columns, site.rows[place.part]):
                raise ValueError(
                    f"{adapter.source}: {module} has {inputs} inputs and {outputs} outputs, that of the model {site.columns} and "
                    f"{site.rows[place.part]}; the adapter is of another model"
                )
            if not all(each.to(site.dtype).isfinite().all() for each in (factors.a, factors.b)):
                raise ValueError(
                    f"{adapter.source}: factors of {module} are infinite or no numbers in {site.dtype}, and would reach requests of "
                    "others; save the adapter again"
                )

    def write(self, slot: int, module: str, factors: Factors) -> None:
        """Put the factors of a linear layer into a slot, wherever the graph has that layer."""
        for place in self._parts_of[module]:
            a, b, scales = self._tensors_of(place)
            rank, first = factors.a.shape[0], place.part * self.rank
            a[slot, first : first + rank] = factors.a.to(a.device, a.dtype)
            b[slot, place.start : place.start + factors.b.shape[0], :rank] = factors.b.to(b.device, b.dtype)
            scales[slot, place.part] = factors.scale

    def clear(self, slot: int) -> None:
        """A slot adds nothing from now on."""
        for tensor in self.tensors:
            tensor[slot].zero_()
