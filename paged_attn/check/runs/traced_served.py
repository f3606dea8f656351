"""Runs the rewritten graph piece by piece as it is served, reading and replacing the values between pieces."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, fx

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.capture.split.split_graph import SplitGraph, split_graph
from paged_attn.capture.split.split_ops import split_ops
from paged_attn.check.runs.boundaries import Boundaries
from paged_attn.check.runs.served import Seen, Served, VisitBoundary
from paged_attn.check.runs.steps import ProbeSettings
from paged_attn.check.runs.tapped import with_strides_of, written_arguments
from paged_attn.compiled.graph_inputs import GraphInputs, logits_of
from paged_attn.compiled.rewritten_graph import RewrittenGraph
from paged_attn.passes.find.attention_site import modules_of

# These ops treat rows separately, or supply the batch's positions.
_ROW_BY_ROW = ("paged_attn::batch_positions_with_output", "paged_attn::module_with_output")


class TracedServed(Served):
    """A rewritten graph as it is served: its pieces, pool and backend. `split`: by default the pieces that serve, compiled or not."""

    otherwise = "compile=False hooks the model's attention instead of rewriting its graph"
    more_than_attention = (
        "A pass changed more than it may: disable_passes=(NAME, ...) leaves optional ones out, which `paged-attn passes` lists; "
        "compile=False traces nothing"
    )

    def __init__(self, compiled: RewrittenGraph, inputs: GraphInputs, settings: ProbeSettings, split: SplitGraph | None = None) -> None:
        assert compiled.split is not None
        self.compiled, self.split = compiled, compiled.split if split is None else split
        self.boundaries = Boundaries.of(compiled.rewrite, self.split)
        self.inputs, self.settings = inputs, settings
        self.specs, self.kv_dtype, self.recurrent = compiled.specs, compiled.dtype(inputs), compiled.recurrent or ()
        self.by_layer = {each.layer.layer_id: each for each in self.boundaries.written.values() if each.layer is not None}
        self._modules = compiled.rewrite.modules or modules_of(compiled.original.graph, self.boundaries.names)

    def variant(self, settings: ProbeSettings, compiled: bool = True) -> TracedServed | None:
        if compiled:
            return TracedServed(self.compiled, self.inputs, settings, self.split)
        if self.compiled.pieces is None or self.split is not self.compiled.split:
            return None
        assert self.compiled.rewrite.gm is not None
        return TracedServed(self.compiled, self.inputs, settings, split_graph(self.compiled.rewrite.gm, split_ops()))

    def run(self, batch: Batch, visit: VisitBoundary) -> Tensor:
        logits = logits_of(self._call(PiecewiseRun(self.split, self.boundaries, visit), batch))
        return logits if self.inputs.takes_logits_rows else logits[batch.logits_rows]

    def run_pieces(self, batch: Batch, visit: VisitBoundary) -> dict[tuple[str, int], Seen]:
        run = PiecewiseRun(self.split, self.boundaries, visit, self._mixing)
        self._call(run, batch)
        return {key: Seen(self._module(*key), value) for key, value in run.seen.items()}

    def operands(self, batch: Batch, visit: VisitBoundary, layer_id: int) -> dict[str, Tensor]:
        run = PiecewiseRun(self.split, self.boundaries, visit)
        self._call(run, batch)
        name = next(name for name, each in self.boundaries.written.items() if each is self.by_layer[layer_id])
        part: fx.GraphModule = getattr(self.split.gm, name)
        op = next((node for node in part.graph.nodes if node.target is UNIFIED_ATTENTION), None)
        if op is None or not op.args[5]:
            return {}
        given = dict(zip((node for node in part.graph.nodes if node.op == "placeholder"), run.given[name], strict=True))
        named = {**dict(zip(("query", "key", "value"), op.args[:3], strict=True)), **op.kwargs}
        return {key: given[node] for key, node in named.items() if node in given and key != "lse_out"}

    def _call(self, run: PiecewiseRun, batch: Batch) -> Any:
        return run.run(*self.inputs.fill(batch.input_ids, batch.positions, batch.logits_rows))

    @property
    def _mixing(self) -> list[str]:
        ops = zip(self.split.breaks, self.split.ops, strict=True)
        return [name for name, op in ops if op.startswith("paged_attn::") and op not in _ROW_BY_ROW]

    def _module(self, name: str, index: int) -> str:
        """The module that computes a piece's result or, if unknown, the next attention."""
        boundary = self.boundaries.results.get((name, index))
        if boundary is not None:
            return self._modules.get(boundary.original, boundary.original)
        later = list(self.split.results)
        layers = [self.boundaries.written[other].layer for other in later[later.index(name) :] if other in self.boundaries.written]
        return next((f"what {layer.spec.module or 'the model'} is given" for layer in layers if layer is not None), name)


class PiecewiseRun(fx.Interpreter):
    """`run(*inputs)` calls the submodules of a split graph in order, compiled or not; results of `visit` replace each value.

    Args:
        skip: breaks whose op is skipped; what it would write is zero.

    Attributes:
        given: by name of a break, the values of its inputs; tensors are not copied.
        seen: by (submodule, index), every result of the pieces except empty tensors that an op writes later.
    """

    def __init__(self, split: SplitGraph, boundaries: Boundaries, visit: VisitBoundary, skip: Collection[str] = ()) -> None:
        super().__init__(split.gm)
        self.boundaries, self.visit, self.skip = boundaries, visit, skip
        self.given: dict[str, tuple[Any, ...]] = {}
        self.seen: dict[tuple[str, int], Tensor] = {}
        self._made_by: dict[int, tuple[str, int]] = {}  # by the id of a live tensor
        self._breaks = frozenset(split.breaks)
        self._operand_indices = {name: operand_indices(getattr(split.gm, name)) for name in boundaries.given}
        self._written = {name: written_indices(getattr(split.gm, name)) for name in split.breaks}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = str(target)
        if name not in self._breaks:
            return self._results(name, self.fetch_attr(name)(*args, **kwargs))
        args = self._operands(name, args)
        self.given[name] = args
        written = [args[argument] for argument in self._written[name]]
        for tensor in written:
            self.seen.pop(self._made_by.get(id(tensor), ("", 0)), None)
        if name in self.skip:
            for tensor in written:
                tensor.zero_()
            result = None
        else:
            result = self.fetch_attr(name)(*args, **kwargs)
        boundary = self.boundaries.written.get(name)
        if boundary is not None and written:
            value = self.visit(boundary, written[0])
            if value is not written[0]:
                written[0].copy_(value)
        return self._results(name, result)

    def _operands(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a break with what `visit` returns of query, key and value."""
        boundaries = self.boundaries.given.get(name, ())
        if not boundaries:
            return args
        changed = list(args)
        for argument, boundary in zip(self._operand_indices[name], boundaries, strict=True):
            changed[argument] = with_strides_of(args[argument], self.visit(boundary, args[argument]))
        return tuple(changed)

    def _results(self, name: str, result: Any) -> Any:
        if isinstance(result, (tuple, list)):
            return tuple(self._result(name, index, each) for index, each in enumerate(result))
        return self._result(name, 0, result)

    def _result(self, name: str, index: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        self.seen[name, index] = value.clone()
        boundary = self.boundaries.results.get((name, index))
        passed_on = value if boundary is None else with_strides_of(value, self.visit(boundary, value))
        self._made_by[id(passed_on)] = name, index
        return passed_on


def written_indices(part: fx.GraphModule) -> list[int]:
    """At which indices a break's submodule is given the tensors that its op writes, in the order of its arguments."""
    inputs = [node for node in part.graph.nodes if node.op == "placeholder"]
    return [
        inputs.index(node) for call in part.graph.nodes if call.op == "call_function" for node in written_arguments(call) if node in inputs
    ]


def operand_indices(part: fx.GraphModule) -> list[int]:
    """At which indices a break's submodule is given query, key and value."""
    inputs = [node for node in part.graph.nodes if node.op == "placeholder"]
    op = next(node for node in part.graph.nodes if node.target is UNIFIED_ATTENTION)
    return [inputs.index(node) for node in op.args[:3]]
