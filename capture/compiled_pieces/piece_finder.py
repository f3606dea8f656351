"""The pieces of a split graph, each with the fake inputs that reach it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from paged_attn.capture.split.fingerprint import fingerprint
from paged_attn.capture.split.split_graph import SplitGraph
from paged_attn.capture.split.symbolic_sizes import Sizes


@dataclass(frozen=True)
class Piece:
    """A piece that computes something.

    Attributes:
        name: its name in the split graph.
        gm: the piece, changed to return a tuple.
        single: whether the piece itself returned the only element.
        inputs: fake tensors, symbolic sizes and numbers.
        fingerprint: None if the piece cannot be compared with others.
    """

    name: str
    gm: fx.GraphModule
    single: bool
    inputs: tuple[Any, ...]
    sizes: Sizes
    fingerprint: str | None


def pieces_of(split: SplitGraph, traced: Sequence[Any]) -> list[Piece]:
    """All pieces that compute something, in order. Must run inside the Dynamo backend call.

    Args:
        traced: Dynamo's fake tensors and symbolic sizes for the graph's inputs.
    """
    finder = _PieceFinder(split)
    finder.run(*traced)
    return finder.found


def computes(piece: fx.GraphModule) -> bool:
    return any(node.op.startswith("call_") for node in piece.graph.nodes)


class _PieceFinder(fx.Interpreter):
    """Runs the split graph on fake tensors; of equal pieces, only the first (running all of 32 layers took five seconds)."""

    def __init__(self, split: SplitGraph) -> None:
        super().__init__(split.gm)
        self.pieces = frozenset(split.pieces)
        self.found: list[Piece] = []
        self.outputs: dict[tuple[str, tuple[sympy.Symbol, ...]], Any] = {}
        context = TracingContext.get()
        assert context.fake_mode is not None
        self.fake_mode = context.fake_mode

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run on Dynamo's inputs in the fake mode of the tracing context (not Dynamo's own), with the same symbols."""
        # Composite operations on symbolic sizes need the Python dispatcher (torch 2.11). This run also turns numbers in tensors into new
        # symbols; they must be ignored, because Inductor refuses a piece while such a symbol waits for the operation that made it.
        env = self.fake_mode.shape_env
        with self.fake_mode, env.ignore_fresh_unbacked_symbols() if env else nullcontext(), enable_python_dispatcher(), torch.no_grad():
            return super().run(*map(_recreated, args), **kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        piece = getattr(self.module, str(target))
        if target not in self.pieces or not isinstance(piece, fx.GraphModule) or not computes(piece):
            return super().call_module(target, args, kwargs)
        whole, single = _returning_tuple(piece)
        # Before the run, because a piece that writes in place may change its inputs' sizes.
        found = Piece(str(target), whole, single, args, Sizes(args), fingerprint(whole, args))
        self.found.append(found)
        if found.fingerprint is None:
            return super().call_module(target, args, kwargs)
        key = found.fingerprint, found.sizes.symbols
        if key in self.outputs:
            return tree_map(_recreated, self.outputs[key])
        result = super().call_module(target, args, kwargs)
        if _are_new(result, args) and fingerprint(whole, args) == found.fingerprint:
            self.outputs[key] = result
        return result

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A table that a pass has put there, as a fake tensor; `split_graph` hands it to the pieces as an input."""
        value = super().get_attr(target, args, kwargs)
        return self.fake_mode.from_tensor(value, static_shapes=True) if isinstance(value, Tensor) else value


def _are_new(outputs: Any, inputs: Sequence[Any]) -> bool:
    """Whether `_recreated` can reproduce the outputs: plain tensors that share no memory with the inputs or each other, and whose sizes
    contain only the inputs' symbols."""
    new = [value for value in tree_leaves(outputs) if isinstance(value, Tensor)]
    if any(type(value) is not FakeTensor or value.layout != torch.strided or value.is_conj() or value.is_neg() for value in new):
        return False
    given = {value.untyped_storage()._cdata for value in inputs if isinstance(value, Tensor)}
    storages = [value.untyped_storage()._cdata for value in new]
    shared = len(set(storages)) < len(storages) or not given.isdisjoint(storages)
    return not shared and set(Sizes(tree_leaves((outputs, inputs))).symbols) == set(Sizes(inputs).symbols)


def _returning_tuple(piece: fx.GraphModule) -> tuple[fx.GraphModule, bool]:
    """A copy that returns a tuple, as artifacts from disk always do, and whether the piece itself returns a single value."""
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    output = graph.graph_copy(piece.graph, nodes)
    single = not isinstance(output, tuple | list)
    graph.output((output,) if single else output)
    return fx.GraphModule(piece, graph), single


def _recreated(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if isinstance(offset := value.storage_offset(), int) and offset == 0:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    count = value.untyped_storage().nbytes() // value.itemsize
    return torch.empty(count, dtype=value.dtype, device=value.device).as_strided(value.size(), value.stride(), offset)
