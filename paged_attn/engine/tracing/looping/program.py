"""A block as a graph for any number of tokens: its own operations around one op that replaces the sum of its experts."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.engine.tracing.looping.calls import NotProved
from paged_attn.engine.tracing.looping.common_steps import Times
from paged_attn.engine.tracing.looping.tape import Slot, Step, Tape, slots_in

OPERANDS = ("w1", "w2", "b1", "b2")
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}  # what torch takes these classes for
_WRITTEN = (bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
_PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "addmm", "einsum")


@dataclass(frozen=True)
class ExpertsSite:
    """Where a block's experts stand on its tape.

    Attributes:
        x, ids, weights: slots of the tokens [.., H], of the chosen experts [.., k], and of their weights [.., k], or of all experts'
            weights [.., E] if `of_all`; None: they are ones.
        total: of what the experts add up to [.., H]; `step`: after which it is that.
        some: of the ids some stand for no expert.
    """

    x: Slot
    ids: Slot
    weights: Slot | None
    of_all: bool
    total: Slot
    step: int
    some: bool = False


@dataclass(frozen=True)
class Program:
    """Attributes:
    gm: takes the tensors that the block is given, those of its own in `owned`, and the operands of the op; returns what the block returns.
    logits: the node [T, E] of which the choice is made, and its step; None where none is seen.
    """

    gm: fx.GraphModule
    owned: tuple[str, ...]
    logits: tuple[str, int] | None

    @property
    def code_name(self) -> str:
        """The name of the code that fx generated, which lies in no file."""
        return type(self.gm).forward.__code__.co_filename


def program_of(
    tape: Tape, common: Mapping[int, Step], site: ExpertsSite, given: Sequence[str], axis: int, output: Any, experts: int, op: Sequence[Any]
) -> Program:
    """The graph.

    Args:
        common: steps of the tape that hold for any number of tokens.
        given: names of what the block is given, in order; the tokens are axis `axis` of the first.
        output: what the block returns, with slots in place of tensors.
        experts: how many there are.
        op: the last arguments of the op: its gate, and its backend.

    Raises:
        NotProved: the block does something that depends on its data besides.
    """
    needed = _Needed(tape, common, site)
    after = needed.back_to(site.step, slots_in(output))
    before = needed.back_to(-1, {slot for slot in (site.x, site.ids, site.weights) if slot is not None})
    owned = tuple(sorted({str(tape.origin[slot.index]) for slot in needed.slots if isinstance(tape.origin[slot.index], str)} - {*given}))
    graph = fx.Graph()
    nodes = {name: graph.placeholder(f"{kind}_{i}") for kind, names in (("given", given), ("owned", owned)) for i, name in enumerate(names)}
    operands = [graph.placeholder(name) for name in OPERANDS]
    writer = _Writer(graph, tape, nodes, graph.call_method("size", (nodes[given[0]], axis)))
    for index in before:
        writer.step(common[index])
    logits = _logits(tape, before, site, [*given], experts)
    named = None if logits is None else (writer.node(tape.steps[logits].results[0]).name, logits)
    writer.experts(site, operands, experts, op)
    for index in after:
        writer.step(common[index])
    graph.output(map_aggregate(output, writer.with_nodes))
    graph.lint()
    return Program(fx.GraphModule({}, graph), owned, named)


def _logits(tape: Tape, steps: Sequence[int], site: ExpertsSite, given: Sequence[str], experts: int) -> int | None:
    """The first product with a number for each token and expert, or else the first such values that are not the tokens themselves."""
    x = tape.values[site.x.index]
    apart = {slot for index, origin in enumerate(tape.origin) if origin in given for slot in tape.same_memory(Slot(index))}
    apart |= tape.same_memory(site.x)
    found = []
    for index in steps:
        results = tape.steps[index].results
        value = tape.values[results[0].index] if len(results) == 1 and results[0] is not None and results[0] not in apart else None
        if (
            value is not None
            and value.is_floating_point()
            and value.shape[-1:] == (experts,)
            and value.numel() * x.shape[-1] == x.numel() * experts
        ):
            found.append(index)
    products = [index for index in found if _name(tape.steps[index]) in _PRODUCTS]
    return next(iter(products or found), None)


class _Needed:
    """Steps that a block's output needs, without those that its experts' sum does."""

    def __init__(self, tape: Tape, common: Mapping[int, Step], site: ExpertsSite) -> None:
        self._tape, self._common, self._site = tape, common, site
        self._total = tape.same_memory(site.total)
        self._next = len(tape.steps) - 1
        self.slots: set[Slot] = set()

    def back_to(self, last: int, wanted: set[Slot]) -> list[int]:
        """In order, the steps behind `last` that make `wanted`, or what was wanted before, or write into it."""
        self.slots |= wanted
        found = []
        for index in range(self._next, last, -1):
            step = self._tape.steps[index]
            touched = set().union(*(self._tape.same_memory(slot) for slot in step.written))
            made = {slot for slot in step.results if slot is not None}
            after = index > self._site.step
            if not (made | touched) & (self.slots if after else self.slots - self._total):
                continue
            if index not in self._common or (not after and (made | touched) & self._tape.tainted):
                raise NotProved(f"what it computes besides its experts depends on its data ({_name(step)})")
            found.append(index)
            self.slots |= step.given
        self._next = last
        lost = [slot for slot in self.slots if self._tape.origin[slot.index] is None and slot not in self._total]
        if lost:
            raise NotProved("it computes with a tensor that is neither given nor its own parameter or buffer")
        return found[::-1]


class _Writer:
    """Writes steps of a tape into a graph."""

    def __init__(self, graph: fx.Graph, tape: Tape, named: Mapping[str, fx.Node], tokens: fx.Node) -> None:
        self._graph, self._tape, self._tokens = graph, tape, tokens
        self._nodes: dict[Slot, fx.Node] = {
            Slot(index): named[origin] for index, origin in enumerate(tape.origin) if isinstance(origin, str) and origin in named
        }
        self._times: dict[Times, fx.Node] = {Times(1): tokens}

    def node(self, slot: Slot | None) -> fx.Node:
        if slot not in self._nodes:
            raise NotProved("it looks at what its experts add up to in another shape than one row for each token")
        return self._nodes[slot]

    def with_nodes(self, value: Any) -> Any:
        """Nodes in place of slots and multiples of the number of tokens."""
        if isinstance(value, Slot):
            return self.node(value)
        if isinstance(value, Times):
            if value not in self._times:
                product = self._graph.call_function(operator.mul, (self._tokens, value.factor))
                self._times[value] = product if value.parts == 1 else self._graph.call_function(operator.floordiv, (product, value.parts))
            return self._times[value]
        if isinstance(value, type) and value in _DTYPES:
            return _DTYPES[value]
        if not isinstance(value, _WRITTEN):
            raise NotProved(f"it gives a function of torch a {type(value).__name__}")
        return value

    def step(self, step: Step) -> None:
        made = self._call(step.function, map_aggregate(step.args, self.with_nodes), map_aggregate(step.kwargs, self.with_nodes))
        for place, slot in enumerate(step.results):
            if slot is not None:
                self._nodes[slot] = self._graph.call_function(operator.getitem, (made, place)) if step.several else made

    def experts(self, site: ExpertsSite, operands: Sequence[fx.Node], experts: int, op: Sequence[Any]) -> None:
        """The op; all that lies where the total lies are views of what it gives."""
        values = self._tape.values
        x, hidden = values[site.x.index], values[site.x.index].shape[-1]
        chosen = values[site.ids.index].numel() * hidden // x.numel()
        call = self._graph.call_method

        def rows(slot: Slot, width: int) -> fx.Node:
            return call("reshape", (self._nodes[slot], -1, width))

        ids = rows(site.ids, chosen)
        if site.some:
            ids = call("masked_fill", (ids, self._graph.call_function(operator.lt, (ids, 0)), experts))
        if site.weights is None:
            weights = self._graph.call_function(torch.ones_like, (ids,), {"dtype": x.dtype})
        elif site.of_all:
            known = call("clamp", (ids, 0, experts - 1)) if site.some else ids
            weights = call("gather", (rows(site.weights, experts), 1, known))
        else:
            weights = rows(site.weights, chosen)
        total = self._graph.call_function(EXPERTS, (rows(site.x, hidden), ids, weights, *operands, *op))
        if values[site.total.index].dtype != x.dtype:
            total = call("to", (total, values[site.total.index].dtype))
        for slot in self._tape.same_memory(site.total):
            value = values[slot.index]
            if value.numel() == values[site.total.index].numel() and value.is_contiguous():
                if value.shape[-1] == hidden and all(size in (1, value.numel() // hidden) for size in value.shape[:-1]):
                    self._nodes[slot] = call("view", (total, *([1] * (value.dim() - 2)), -1, hidden))

    def _call(self, function: Any, args: Any, kwargs: Any) -> fx.Node:
        name = getattr(function, "__name__", "")
        if name == "__get__":
            return self._graph.call_function(getattr, (args[0], function.__self__.__name__))
        if getattr(Tensor, name, None) is not function:
            return self._graph.call_function(function, args, kwargs)
        if not name.startswith("__"):
            return self._graph.call_method(name, args, kwargs)
        if hasattr(operator, name):
            return self._graph.call_function(getattr(operator, name), args, kwargs)
        if name.startswith("__r") and hasattr(operator, f"__{name[3:]}"):
            return self._graph.call_function(getattr(operator, f"__{name[3:]}"), args[::-1], kwargs)
        raise NotProved(f"it calls Tensor.{name}")


def _name(step: Step) -> str:
    return str(getattr(step.function, "__name__", step.function))


class Evaluation(fx.Interpreter):
    """Runs a program, whose logits are these if there are some; if `one_hot`, experts give one-hot rows."""

    def __init__(self, program: Program, logits: Tensor | None, one_hot: bool = False) -> None:
        super().__init__(program.gm)
        self._name, self._logits, self._one_hot = program.logits[0] if program.logits else "", logits, one_hot

    def run_node(self, n: fx.Node) -> Any:
        if self._logits is not None and n.name == self._name:
            return self._logits.clone()
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self._one_hot and target is EXPERTS:
            x, ids, weights, w1 = args[:4]
            counted = weights.to(x.dtype) * (ids < len(w1))
            return torch.zeros_like(x).scatter_add_(1, ids.clamp(max=len(w1) - 1), counted)
        return super().call_function(target, args, kwargs)
