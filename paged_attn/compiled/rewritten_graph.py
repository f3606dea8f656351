"""One Dynamo graph and its results: the original, the rewritten graph, its pieces."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException

from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.experts import ExpertsSpec
from paged_attn.backends.devices import has_triton
from paged_attn.backends.experts.base import ExpertsProblem
from paged_attn.backends.selection.experts import select_experts
from paged_attn.capture.compiled_pieces.artifacts import ArtifactCache
from paged_attn.capture.compiled_pieces.pieces import PieceReport, compile_pieces
from paged_attn.capture.split.split_graph import SplitGraph, split_graph
from paged_attn.capture.split.split_ops import split_ops
from paged_attn.compiled.experts_ahead import compile_graph_ahead
from paged_attn.compiled.graph_inputs import GraphInputs
from paged_attn.compiled.lora_graph import LoraGraph
from paged_attn.compiled.options import CompileOptions
from paged_attn.compiled.steps_ahead import RunsWith, compile_steps_ahead
from paged_attn.hashing.code_files import traced_files
from paged_attn.passes.fx.graph_tools import value_of
from paged_attn.passes.fx.model_facts import least, max_positions, model_device, model_dtype
from paged_attn.passes.optimize.linears.merge import Merge
from paged_attn.passes.report import Rewrite
from paged_attn.passes.runner import rewrite
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.stopwatch import part

logger = logging.getLogger("paged_attn")


@dataclass(eq=False, repr=False)
class RewrittenGraph:
    """Made inside a Dynamo backend call, or from a record on disk.

    Args:
        traced_from: the model, if it is known; it is not kept alive.

    Attributes:
        original: the graph as it was traced.
        rewrite: what the passes found.
        max_positions: the longest sequence, as the model's config or its tables of positions say; None if neither does.
        split: the rewritten graph in pieces, or None if the call is not a paged one.
        pieces: how the pieces were compiled, or None if they run as they are.
        lora: the variant with adapters, where the options ask for it.
        files: those whose Python code the trace went through; None where that is not known.
        recurrent: the layers that the graph's recurrent ops stand for, by layer id, set by who captured it; None if nobody has looked.
    """

    original: fx.GraphModule
    rewrite: Rewrite
    split: SplitGraph | None
    pieces: PieceReport | None
    traced_from: InitVar[nn.Module | None]
    options: CompileOptions
    files: frozenset[str] | None = None
    lora: LoraGraph | None = None

    def __post_init__(self, traced_from: nn.Module | None) -> None:
        self.max_positions = least(max_positions(traced_from), self.rewrite.max_positions)
        self.roles = tuple(self.rewrite.form.roles.values())
        self.recurrent: tuple[RecurrentLayer, ...] | None = None
        self._model = None if traced_from is None else weakref.ref(traced_from)
        self.compiled_by = "eager pieces" if self.pieces is None else "Inductor pieces"

    @classmethod
    def of_trace(
        cls, gm: fx.GraphModule, example_inputs: Sequence[Any], model: nn.Module | None, options: CompileOptions, limited: bool = False
    ) -> Self:
        """Rewrite, split and compile a graph, inside the Dynamo backend call that was given it. `limited`: see `find_call_form`. Raises
        UnsupportedError: see `rewrite`."""

        def choose_experts(spec: ExpertsSpec, weight: Tensor) -> str:
            return select_experts(options.experts_backend, ExpertsProblem.of(spec, weight)).name

        with part("rewrite and prove"):
            found = rewrite(gm, example_inputs, model, limited, options.passes, choose_experts)
        if found.gm is None:
            logger.info("this call runs as written and not paged: %s", found.not_paged)
            return cls(gm, found, None, None, model, options, traced_files())
        compile_graph_ahead(found.gm.graph)
        if options.runs_with is not None and model is not None and model_device(model).type == "cuda" and has_triton():
            _compile_kernels(found.gm.graph, found.specs, model_dtype(model), model_device(model), options.runs_with)
        options = replace(options, runs_with=None)  # it holds modules
        split = split_graph(found.gm, split_ops())
        pieces = lora = None
        if wants_inductor(options, example_inputs):
            traced = [value_of(node) for node in found.gm.graph.nodes if node.op == "placeholder"]
            with part("Inductor"):
                pieces = compile_pieces(split, traced, ArtifactCache.of_user())
        if options.max_loras and model is not None:
            lora = LoraGraph.of(found, example_inputs, model, options.max_loras, options.max_lora_rank, pieces is not None)
        return cls(gm, found, split, pieces, model, options, traced_files(), lora)

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        return self.rewrite.specs

    @property
    def merges(self) -> tuple[Merge, ...]:
        """The merges of the rewrite, and weights alone that have spare rows for adapters."""
        widened = {merge.inputs[0]: merge for merge in (self.lora.widened if self.lora else ())}
        return (*(widened.pop(merge.inputs[0], merge) for merge in self.rewrite.merges), *widened.values())

    @property
    def model(self) -> nn.Module | None:
        """The one that the graph was traced from, as long as it lives."""
        return None if self._model is None else self._model()

    def dtype(self, inputs: GraphInputs) -> torch.dtype:
        """The model's own floating type, which its KV has; `inputs` tell it where the model is not known."""
        return inputs.dtype if self.model is None else model_dtype(self.model)


def wants_inductor(options: CompileOptions, example_inputs: Sequence[Any]) -> bool:
    """Whether the pieces are compiled: as the options say, else if the model lies on a GPU."""
    if options.inductor is not None:
        return options.inductor
    return any(isinstance(value, Tensor) and value.is_cuda for value in example_inputs)


def _compile_kernels(
    graph: fx.Graph, layers: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, runs_with: RunsWith
) -> None:
    """Ahead of the first step, as far as steps run on fake tensors; what does not is compiled where it is launched, and takes longer."""
    try:
        compile_steps_ahead(graph, layers, dtype, device, runs_with)
    except (UnsupportedOperatorException, DataDependentOutputException, DynamicOutputShapeException) as error:
        logger.warning(
            "kernels of this model are not compiled ahead, so that it starts later: a step does not run on fake tensors (%s)", error
        )
