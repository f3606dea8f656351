"""A model whose attention is hooked (`paged_attn.patch`), checked like a rewritten graph: at what every decoder layer and every
attention is given, at what every attention gives, and at the logits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.check.compare.against_model import Logits, check_against_model
from paged_attn.check.compare.diagnosis import EXACT_BACKEND
from paged_attn.check.compare.noise import Noise
from paged_attn.check.compare.overflow import naming_overflow
from paged_attn.check.compare.windows import attend_in_steps
from paged_attn.check.runs.boundaries import Boundary
from paged_attn.check.runs.served import AS_IT_IS, HowToRun, Original, Seen, Served, VisitBoundary
from paged_attn.check.runs.steps import ProbeSettings, others_for
from paged_attn.check.runs.tapped import Visit, wider
from paged_attn.check.runs.truth import Truth
from paged_attn.check.self_check import check_served
from paged_attn.passes.fx.model_facts import max_positions, model_dtype
from paged_attn.passes.report import LayerReport

logger = logging.getLogger("paged_attn")
HEADS_FIRST = (0, 2, 1, 3)  # transformers' attention functions return [1, T, heads, v_dim]
OPERANDS = ("query", "key", "value")


class HookedModel(Protocol):
    """A model with hooked attention, as a check sees it; outside forward contexts it computes what it did before."""

    model: nn.Module
    layers: tuple[AttentionSpec, ...]

    def logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[T, vocabulary] of token ids and positions [T], int64."""

    def watched(self, watch: Watch) -> AbstractContextManager[None]:
        """Inside, every attention of this thread passes its inputs and outputs through `watch`."""


def check_hooked(patched: HookedModel, model_logits: Logits, prompts: Sequence[Tensor], settings: ProbeSettings) -> None:
    """Compares a patched model with the original. `model_logits`: prompt [T] -> logits [T, vocabulary] of the model before it was patched.
    Raises UnsupportedError: they differ, as in `self_check`."""
    started = time.perf_counter()
    with torch.no_grad():
        taps = TappedModel(patched)
        original = HookedOriginal(taps)
        longest = max_positions(patched.model)
        truth = Truth(original, list(taps.by_name.values()), prompts, others_for(prompts, longest))
        served = HookedServed(taps, settings)
        name = type(patched.model).__name__
        with naming_overflow(original, truth, name):
            noise = Noise(original, truth, served.is_causal, settings.length_borders)
            check_against_model(model_logits, original, truth, name, settings)
            check_served(served, original, truth, noise, served.exact_attention, longest, patched.model)
    logger.info("self-check of the hooked model passed in %.2f s", time.perf_counter() - started)


@dataclass
class Watch:
    """How a check reads and replaces values in a hooked attention.

    Attributes:
        value: called with every name and value; returns the value to use.
        wide: compute the model's own attention in this wider dtype.
        without_attention: skip the attention; `value` then gets zeros as its output.
        sinks: by layer, as passed to the attention.
    """

    value: Callable[[str, Tensor], Tensor]
    wide: torch.dtype | None = None
    without_attention: bool = False
    sinks: dict[int, Tensor] = field(default_factory=dict)

    def given(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Each [1, heads, T, dim]."""
        operands = zip(OPERANDS, (query, key, value), strict=True)
        return [self.value(_operand(layer, name), operand) for name, operand in operands]

    def output(self, layer: int, output: Tensor) -> Tensor:
        """[1, T, heads, v_dim]"""
        return self.value(_attention(layer), output)


class TappedModel:
    """The places in a patched model where values are read."""

    def __init__(self, patched: HookedModel) -> None:
        self.patched, self.specs = patched, patched.layers
        reports = [LayerReport(i, spec, "", "", "", _attention(i), HEADS_FIRST, "") for i, spec in enumerate(self.specs)]
        self.by_layer = {i: Boundary(_attention(i), report) for i, report in enumerate(reports)}
        self.blocks = _blocks(patched.model, [spec.module for spec in self.specs])
        given = [_operand(layer, name) for layer in self.by_layer for name in OPERANDS]
        names = [*given, *(_block(path) for path in self.blocks)]
        self.by_name = {**{name: Boundary(name) for name in names}, **{each.original: each for each in self.by_layer.values()}}
        self.narrow = model_dtype(patched.model)

    def run(self, ids: Tensor, positions: Tensor, watch: Watch) -> Tensor:
        """Logits [T, vocabulary] for ids and positions [T], with `watch` applied."""
        with ExitStack() as undo:
            undo.enter_context(self.patched.watched(watch))
            for path, block in self.blocks.items():
                hook = block.register_forward_pre_hook(_entering(_block(path), watch), with_kwargs=True)
                undo.callback(hook.remove)
            return self.patched.logits(ids, positions)

    def module_of(self, name: str) -> str:
        """`query of attention 2 (model.layers.2.self_attn)`"""
        layer = next((i for i in self.by_layer if name.endswith(_attention(i))), None)
        return name if layer is None else f"{name} ({self.specs[layer].module})"


class HookedOriginal(Original):
    """The patched model outside forward contexts, where it computes what it did before."""

    def __init__(self, taps: TappedModel) -> None:
        self.taps, self.narrow, self.recurrent = taps, taps.narrow, ()
        self.computed_as_it_is = set()

    def run(self, prompt: Tensor, visit: Visit, how: HowToRun = AS_IT_IS) -> Tensor:
        """With `wide`, only the attention is computed in wider numbers. Only the results of `visit` are perturbed, and no choices are
        recorded."""
        rows = torch.arange(len(prompt), device=prompt.device) if how.positions is None else how.positions
        return self.taps.run(prompt, rows, Watch(visit, wider(self.narrow) if how.wide else None))

    def padded_length(self, count: int) -> int:
        return count

    def module_of(self, name: str) -> str:
        return self.taps.module_of(name)


class HookedServed(Served):
    """The patched model under a forward context."""

    otherwise = "torch.compile(model, backend='paged_attn') rewrites the model's graph instead of hooking its attention"
    more_than_attention = (
        "The model depends on more than its attention interface tells; torch.compile(model, backend='paged_attn') sees all of it"
    )

    def __init__(self, taps: TappedModel, settings: ProbeSettings) -> None:
        self.taps, self.settings = taps, settings
        self.specs, self.kv_dtype, self.recurrent, self.by_layer = taps.specs, taps.narrow, (), taps.by_layer

    def variant(self, settings: ProbeSettings, compiled: bool = True) -> HookedServed | None:
        return HookedServed(self.taps, settings) if compiled else None

    def run(self, batch: Batch, visit: VisitBoundary) -> Tensor:
        return self._run(batch, Watch(lambda name, value: self._visited(visit, name, value)))[batch.logits_rows]

    def run_pieces(self, batch: Batch, visit: VisitBoundary) -> Mapping[Any, Seen]:
        seen: dict[str, Seen] = {}

        def see(name: str, value: Tensor) -> Tensor:
            if self.taps.by_name[name].layer is None:
                seen[name] = Seen(self.taps.module_of(name), value.clone())
            return self._visited(visit, name, value)

        self._run(batch, Watch(see, without_attention=True))
        return seen

    def operands(self, batch: Batch, visit: VisitBoundary, layer_id: int) -> dict[str, Tensor]:
        if self.specs[layer_id].kv_layer != layer_id:
            return {}
        found: dict[str, Tensor] = {}
        names = {_operand(layer_id, name): name for name in OPERANDS}

        def see(name: str, value: Tensor) -> Tensor:
            value = self._visited(visit, name, value)
            if name in names:
                found[names[name]] = value[0].transpose(0, 1).clone()
            return value

        watch = Watch(see)
        self._run(batch, watch)
        return {**found, "sinks": watch.sinks[layer_id]} if layer_id in watch.sinks else found

    def exact_attention(self, layer: LayerReport, chosen: Tensor, given: dict[str, Tensor], _: bool) -> Tensor | str:
        """The mask was proved as a function of positions, so the spec, computed exactly, stands in for the model's attention."""
        exact = replace(self.settings, backend=EXACT_BACKEND, deterministic=False)
        operands = {name: tensor.float() for name, tensor in given.items()}
        return attend_in_steps(layer.spec, operands, chosen, torch.float32, exact)

    def _run(self, batch: Batch, watch: Watch) -> Tensor:
        return self.taps.run(batch.input_ids, batch.positions, watch)

    def _visited(self, visit: VisitBoundary, name: str, value: Tensor) -> Tensor:
        """Calls `visit`, with attention in the op's layout [T, heads, v_dim]."""
        boundary = self.taps.by_name[name]
        return visit(boundary, value) if boundary.layer is None else visit(boundary, value[0])[None]


def _attention(layer: int) -> str:
    return f"attention {layer}"


def _operand(layer: int, name: str) -> str:
    return f"{name} of attention {layer}"


def _block(path: str) -> str:
    return f"what {path} is given"


def _blocks(model: nn.Module, attentions: Sequence[str]) -> dict[str, nn.Module]:
    """The decoder layers by path: for each attention, the nearest enclosing module that is in a ModuleList."""
    found: dict[str, nn.Module] = {}
    for path in attentions:
        parts = path.split(".")
        for end in range(len(parts) - 1, 0, -1):
            if isinstance(model.get_submodule(".".join(parts[: end - 1])), nn.ModuleList):
                around = ".".join(parts[:end])
                found[around] = model.get_submodule(around)
                break
    return found


def _entering(name: str, watch: Watch) -> Callable[..., Any]:
    """A hook that passes a block's hidden states [1, T, width], its first tensor, through the watch."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args and isinstance(args[0], Tensor):
            return (watch.value(name, args[0]), *args[1:]), kwargs
        if isinstance(kwargs.get("hidden_states"), Tensor):
            return args, {**kwargs, "hidden_states": watch.value(name, kwargs["hidden_states"])}
        return args, kwargs

    return before
