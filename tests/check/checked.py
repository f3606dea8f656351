"""A model captured or hooked once, and its self-check run again and again with something planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.compiled.options import CompileOptions
from paged_attn.compiled_graph import CompiledGraph
from paged_attn.engine.runners import traced_runner
from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.hf.patch import Patched
from tests.check.planted import SPEC_ERRORS, Change, planted

PASSES = ("early_logits_gather", "merge_linears")


class Traced:
    """A model whose graph is rewritten."""

    def __init__(self, model: nn.Module, passes: Sequence[str] = PASSES) -> None:
        self.checks: list[Callable[[], None]] = []
        run = CompiledGraph.check

        def kept(graph: CompiledGraph, *given: Any) -> None:
            self.checks.append(lambda: run(graph, *given))

        # What a hook does to short calls is refused before; here the self-check has to see it.
        with mock.patch.object(CompiledGraph, "check", kept), mock.patch.object(traced_runner, "refuse_branches"):
            self.runner = TracedRunner(model, CompileOptions(inductor=False, passes=tuple(passes)))
        self.graph = self.runner.compiled

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        return self.graph.specs

    def check(self) -> None:
        self.graph._checked.clear()
        self.checks[-1]()

    @contextmanager
    def with_specs(self, change: Change) -> Iterator[None]:
        layers = list(self.graph.rewrite.layers)
        self.graph.rewrite.layers[:] = [replace(layer, spec=change(layer.spec)) for layer in layers]
        try:
            yield
        finally:
            self.graph.rewrite.layers[:] = layers


class Hooked:
    """A model whose attention is hooked, for those that cannot be traced."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        with Patched(model, self_check=False) as patched:
            self.specs = patched.layers

    def check(self) -> None:
        with Patched(self.model):
            pass

    @contextmanager
    def with_specs(self, change: Change) -> Iterator[None]:
        record = Patched._record_layers

        def changed(patched: Patched) -> None:
            record(patched)
            patched.layers = tuple(map(change, patched.layers))

        with mock.patch.object(Patched, "_record_layers", changed):
            yield


def refused(checked: Traced | Hooked, error: str | None = None) -> str:
    """The words with which the self-check refuses, with this error planted; nothing if it passes."""
    planting = nullcontext() if error is None else checked.with_specs(SPEC_ERRORS[error]) if error in SPEC_ERRORS else planted(error)
    try:
        with planting:
            checked.check()
    except UnsupportedError as refusal:
        return str(refusal)
    return ""
