"""What the compile backend returns for one Dynamo graph: the original computation, and the paged one under a forward context."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from paged_attn.attn_ops.context import ForwardContext, current_context
from paged_attn.attn_ops.errors import ContextError, UnsupportedError
from paged_attn.attn_ops.spec import AttentionSpec
from paged_attn.capture.artifacts import ArtifactCache
from paged_attn.capture.pieces import PieceReport, compile_pieces
from paged_attn.capture.split import SplitGraph, split_graph
from paged_attn.capture.split_ops import split_ops
from paged_attn.check.self_check import self_check
from paged_attn.check.steps import ProbeSettings
from paged_attn.graph_cache.code_files import traced_files
from paged_attn.graph_inputs import GraphInputs
from paged_attn.options import CompileOptions
from paged_attn.passes.graph_tools import value_of
from paged_attn.passes.model_facts import max_positions, model_dtype
from paged_attn.passes.runner import Rewrite, rewrite
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.refuse import refuse_recurrent

logger = logging.getLogger("paged_attn")
_recording = threading.local()


class CompiledGraph:
    """Callable with the graph's flat inputs, as Dynamo calls it.

    Outside any forward context it runs the graph as it was traced, so that the compiled model is a drop-in. Under a context it
    runs the rewritten graph, once the self-check has passed; if this call form can not be paged, it says why.

    Attributes:
        original: the graph as it was traced.
        rewrite: what the passes found.
        max_positions: the longest sequence, as the model's config or its tables of positions say; None if neither does.
        split: the rewritten graph in pieces, or None if the call is not a paged one.
        pieces: how the pieces were compiled, or None if they run as they are.
        files: those whose Python code the trace went through; None where that is not known.
        recurrent: the layers that the graph's recurrent ops stand for, by layer id, set by who captured it; None if nobody has looked.
    """

    def __init__(
        self,
        original: fx.GraphModule,
        found: Rewrite,
        split: SplitGraph | None,
        pieces: PieceReport | None,
        model: nn.Module | None,
        options: CompileOptions,
        files: frozenset[str] | None = None,
    ) -> None:
        self.options = options
        self.files = files
        self.original = original
        self.rewrite = found
        limits = [limit for limit in (max_positions(model), found.max_positions) if limit is not None]
        self.max_positions = min(limits, default=None)
        self.roles = tuple(found.form.roles.values())
        self.split = split
        self.recurrent: tuple[RecurrentLayer, ...] | None = None
        self._model = None if model is None else weakref.ref(model)
        self.compiled_by = "eager pieces" if pieces is None else "Inductor pieces"
        self.pieces = pieces
        self._run_paged: Callable[..., Any] | None = None if split is None else split.gm.forward
        # Dynamo runs one graph for several models of a class: each passes the self-check, known by one of its tensors.
        self._marker = self.roles.index("owned") if "owned" in self.roles else None
        self._checked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._check_lock = threading.Lock()
        self._accepted: tuple[AttentionSpec, ...] | None = None
        self.eager_paged: fx.GraphModule | None = found.gm

    @classmethod
    def of_trace(
        cls,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        model: nn.Module | None,
        options: CompileOptions,
        limited: bool = False,
    ) -> CompiledGraph:
        """Rewrite, split and compile a graph, inside the Dynamo backend call that was given it.

        Args:
            limited: see `find_call_form`.

        Raises:
            UnsupportedError: see `rewrite`.
        """
        found = rewrite(gm, example_inputs, model, limited, options.passes)
        split: SplitGraph | None = None
        pieces: PieceReport | None = None
        if found.gm is None:
            logger.info("this call runs as written and not paged: %s", found.not_paged)
        else:
            split = split_graph(found.gm, split_ops())
            if wants_inductor(options, example_inputs):
                traced = [value_of(node) for node in found.gm.graph.nodes if node.op == "placeholder"]
                pieces = compile_pieces(split, traced, ArtifactCache.of_user())
        return cls(gm, found, split, pieces, model, options, traced_files())

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        return self.rewrite.specs

    def __call__(self, *args: Any) -> Any:
        recorded = getattr(_recording, "graphs", None)
        if recorded is not None:
            recorded.append(self)
        context = current_context()
        if context is None:
            return self.original.forward(*args)
        return self.run_paged(context, args)

    def run_paged(self, context: ForwardContext, args: Sequence[Any]) -> Any:
        """Run the rewritten graph for the context's batch.

        Raises:
            UnsupportedError: this call form can not be paged, or the self-check failed.
            ContextError: the inputs or the pool do not belong to this batch and model.
        """
        self.refuse_recurrent()
        if self._run_paged is None:
            raise UnsupportedError(
                f"a forward context is active, but this call of the model can not run a paged batch: {self.rewrite.not_paged}."
                + (" Call compiled(**batch.model_inputs()) inside the context." if "input_ids" in self.roles else "")
            )
        self._check_call(context, args)
        self.check(args)
        return self._run_paged(*args)

    @property
    def model(self) -> nn.Module | None:
        """The one that the graph was traced from, as long as it lives."""
        return None if self._model is None else self._model()

    def dtype(self, inputs: GraphInputs) -> torch.dtype:
        """The model's own floating type, which its KV has; `inputs` tell it where the model is not known."""
        return inputs.dtype if self.model is None else model_dtype(self.model)

    def refuse_recurrent(self) -> None:
        """Raises UnsupportedError for a model with recurrent state, unless who captured the graph keeps that state."""
        if self.recurrent is None and self.model is not None:
            refuse_recurrent(self.model, "torch.compile")
        self.recurrent = self.recurrent or ()

    def check(
        self,
        args: Sequence[Any],
        model_logits: Callable[[Tensor], Tensor] | None = None,
        settings: ProbeSettings | None = None,
        traced_args: Sequence[Any] | None = None,
        again: bool = False,
    ) -> None:
        """Run the self-check unless this model passed it or it is switched off; see `self_check` for the arguments.

        Args:
            again: whether or not the model passed it before, and also where it is switched off.
        """
        if self._marker is None or not (again or (self.options.self_check and args[self._marker] not in self._checked)):
            return
        with self._check_lock:
            if args[self._marker] not in self._checked or again:
                self_check(self, args, model_logits, self.model, settings, traced_args)
                self._checked[args[self._marker]] = True

    def _check_call(self, context: ForwardContext, args: Sequence[Any]) -> None:
        rows = next(args[i].shape[1] for i, role in enumerate(self.roles) if role == "input_ids")
        if rows != context.batch.num_rows:
            raise ContextError(
                f"input_ids has {rows} tokens, but the forward context's batch has {context.batch.num_rows} rows "
                f"({context.batch.num_tokens} tokens, padded to at least 2); call compiled(**batch.model_inputs())"
            )
        if context.pool.layers is not self._accepted:
            _check_layers(self.specs, context.pool.layers)
            self._accepted = context.pool.layers


@contextmanager
def recorded_graphs() -> Iterator[list[CompiledGraph]]:
    """The graphs that this thread calls inside the block, in order.

    Dynamo runs one graph for all models of one class and configuration, whichever of them it was compiled for.
    """
    outer, graphs = getattr(_recording, "graphs", None), list[CompiledGraph]()
    _recording.graphs = graphs
    try:
        yield graphs
    finally:
        _recording.graphs = outer


def wants_inductor(options: CompileOptions, example_inputs: Sequence[Any]) -> bool:
    """Whether the pieces are compiled: as the options say, else if the model lies on a GPU."""
    if options.inductor is not None:
        return options.inductor
    return any(isinstance(value, Tensor) and value.is_cuda for value in example_inputs)


def _check_layers(graph: Sequence[AttentionSpec], pool: Sequence[AttentionSpec]) -> None:
    if len(graph) != len(pool):
        raise ContextError(
            f"the pool has {len(pool)} attention layers, the model {len(graph)}; allocate it with attention_layers(compiled)"
        )
    for index, (ours, theirs) in enumerate(zip(graph, pool, strict=True)):
        if names := ours.differences(theirs):
            raise ContextError(
                f"layer {index} ({ours.module}) of the pool differs from the model's in {', '.join(names)}; "
                "allocate it with attention_layers(compiled)"
            )
