"""Reads from the graph of one token's step how a state follows from the one before, and what reads it.

A state of a linear recurrence is, whatever the layer is called, S' = decay * S + key^T value, and its output is query S'. Every node that
depends on S is followed: those that are S times something plus something, in any shape, and the product or sum that takes an axis away.
What such a sum gives is followed, too: where it comes back to the state, this is a delta rule (`corrections.py`).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from paged_attn.recurrent.inline.find.corrections import corrected, without
from paged_attn.recurrent.inline.find.dims import ROWS, Dims, SplitAxis, after_view, fits, number, sizes, viewed
from paged_attn.recurrent.inline.find.factors import Factor, factors_of, operand, reduced
from paged_attn.recurrent.inline.find.forms import Linear, Product, Read, Recurrence
from paged_attn.recurrent.inline.step_graph import TRACED_ROWS, StepGraph
from paged_attn.recurrent.program import NoOpFits

aten = torch.ops.aten
_ORDERED = (aten.div.Tensor, aten.sub.Tensor)
_ELEMENTWISE = (aten.mul.Tensor, aten.add.Tensor, *_ORDERED)


class _SplitDimension(Exception):
    """The axes of each of the state's dimensions, with another one."""

    def __init__(self, dimensions: list[list[int]]) -> None:
        super().__init__(dimensions)
        self.dimensions = dimensions


def recurrence_of(step: StepGraph, index: int) -> Recurrence:
    """The recurrence of one state.

    Raises:
        NoOpFits: it is not one, or not one that an op computes.
    """
    return followed(step, index).found()


def followed(step: StepGraph, index: int) -> Finder:
    """All nodes that are a linear function of one state."""
    dimensions = [[size] for size in sizes(step.states[index])[1:]]
    while True:
        finder = Finder(step, index, dimensions)
        try:
            finder.follow()
            return finder
        except _SplitDimension as other:
            dimensions = other.dimensions


def depending_on(graph: fx.Graph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes, and what is computed from them."""
    found = set(nodes)
    for node in graph.nodes:
        if any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


class Finder:
    """Follows one state through the graph.

    Attributes:
        axes, shape: as of `Recurrence`; `own`: the state's dims.
        nodes: what is a linear function of the state, or of what was read of it.
        sums: nodes that read it, what they sum, over which axes, and what is left.
        whole: nodes that are read as they are.
    """

    def __init__(self, step: StepGraph, index: int, dimensions: list[list[int]]) -> None:
        self.step, self.state, self.new = step, step.states[index], step.results[1 + index]
        self.dimensions = dimensions
        self.shape = tuple(size for dimension in dimensions for size in dimension)
        self.axes = {ROWS: TRACED_ROWS, **{axis: size for axis, size in enumerate(self.shape) if size > 1}}
        numbers = itertools.count()
        held = [[axis for _ in dimension if (axis := next(numbers)) in self.axes] for dimension in dimensions]
        self.own: Dims = ((ROWS,), *map(tuple, held))
        self.nodes: dict[fx.Node, Linear] = {self.state: Linear(self.own)}
        self.sums: list[tuple[fx.Node, Linear, frozenset[int], Dims]] = []
        self.whole: set[fx.Node] = set()

    def follow(self) -> None:
        for node in self.step.graph.nodes:
            if node.op == "call_function" and any(arg in self.nodes for arg in node.all_input_nodes):
                self._follow(node)
        self._read_whole([self.step.results[0]])

    def found(self) -> Recurrence:
        new = self.nodes.get(self.new)
        if new is None or new.decay is None:
            raise NoOpFits("its new state is no linear function of the state before")
        if new.dims != self.own or len(new.added) != 1:
            raise NoOpFits("its new state is not the state before times something, plus one product")
        inner = {node for _, node in new.returned}
        reads = [read for read in self.sums if read[0] not in inner]
        reads += [(node, self.nodes[node], frozenset[int](), self.nodes[node].dims) for node in self.whole]
        if not reads:
            raise NoOpFits("nothing reads its state")
        queries = [_query(new, form, bool(summed)) for _, form, summed, _ in reads]
        ways = {(query, before, summed) for (query, before, _), (_, _, summed, _) in zip(queries, reads, strict=True)}
        if len(ways) > 1:
            raise NoOpFits("its state is read with several queries")
        ((query, before, summed),) = ways
        decay, added, query = (self.apart(product) for product in (new.decay, new.added[0], query))
        share = None
        if inner:
            added, share = corrected(new, {node: (form, over) for node, form, over, _ in self.sums}, self.apart)
        found = [Read(node, dims, tuple(map(self.apart, more))) for (node, _, _, dims), (_, _, more) in zip(reads, queries, strict=True)]
        self._independent([*decay, *added, *query, *(share or ())], found)
        return Recurrence(self.state, self.axes, self.shape, decay, added, query, summed, before, found, share)

    def _read_whole(self, nodes: Iterable[fx.Node]) -> None:
        """These are read as they are, if they have the state itself."""
        self.whole.update(node for node in nodes if node in self.nodes and self.nodes[node].decay is not None)

    def _follow(self, node: fx.Node) -> None:
        if node.target is operator.getitem or node.target is aten.sym_size.int:
            return
        given = [arg for arg in node.all_input_nodes if arg in self.nodes]
        if (shown := viewed(node)) is not None and given == [shown]:
            followed = self._view(node, shown)
        elif node.target is aten.neg.default:
            followed = self.nodes[given[0]].times(Factor(-1.0))
        elif node.target in _ELEMENTWISE and len(node.args) == 2 and not node.kwargs and node.args[0] is not node.args[1]:
            followed = self._elementwise(node, given)
        elif node.target is aten.sum.dim_IntList:
            followed = self._sum(node, given[0])
        elif node.target is aten.bmm.default and len(given) == 1:
            followed = self._product(node, given[0])
        else:
            followed = None
        if followed is None:
            self._read_whole(given)
        else:
            self.nodes[node] = followed

    def _elementwise(self, node: fx.Node, given: Sequence[fx.Node]) -> Linear | None:
        """A product, quotient, sum or difference."""
        first, second = node.args
        if node.target is aten.mul.Tensor:
            return self._times(node, given[0], second if first is given[0] else first) if len(given) == 1 else None
        if node.target is aten.div.Tensor:
            return self._times(node, given[0], self._inverse(node)) if given == [first] else None
        minus = -1.0 if node.target is aten.sub.Tensor else 1.0
        left, right = (self._term(node, arg, sign) for arg, sign in ((first, 1.0), (second, minus)))
        if left is None or right is None or left.dims != right.dims or (left.decay is not None and right.decay is not None):
            return None
        return left.plus(right)

    def _term(self, node: fx.Node, arg: object, sign: float) -> Linear | None:
        """What an operand adds to the sum that a node is."""
        if isinstance(arg, fx.Node) and arg in self.nodes:
            term = self.nodes[arg]
            dims = ((),) * (len(sizes(node)) - len(term.dims)) + term.dims
            return replace(term if sign == 1 else term.times(Factor(sign)), dims=dims) if fits(dims, sizes(node), self.axes) else None
        others = [self.nodes[each] for each in node.all_input_nodes if each in self.nodes]
        dims = ((),) * (len(sizes(node)) - len(others[0].dims)) + others[0].dims
        return Linear(dims, None, (reduced([Factor(sign), operand(arg, dims)]),)) if fits(dims, sizes(node), self.axes) else None

    def _view(self, node: fx.Node, shown: fx.Node) -> Linear | None:
        form = self.nodes[shown]
        try:
            dims = after_view(node, form.dims, self.axes)
        except SplitAxis as split:
            if form.decay is None:
                return None
            raise _SplitDimension(self._with_axis(split)) from None
        return None if dims is None else replace(form, dims=dims)

    def _with_axis(self, split: SplitAxis) -> list[list[int]]:
        numbers = itertools.count()
        return [
            [part for size in dimension for part in ([size // split.inner, split.inner] if next(numbers) == split.axis else [size])]
            for dimension in self.dimensions
        ]

    def _times(self, node: fx.Node, given: fx.Node, factor: object) -> Linear | None:
        dims = self._spread(self.nodes[given].dims, sizes(node))
        return None if dims is None else replace(self.nodes[given].times(operand(factor, dims)), dims=dims)

    def _spread(self, dims: Dims, shape: Sequence[int]) -> Dims | None:
        """The dims of a product of this shape; where it is larger than a tensor with these dims, it has axes that were summed."""
        missing = [axis for axis in sorted(self.axes) if axis not in itertools.chain(*dims)]
        found = [*((),) * (len(shape) - len(dims)), *dims]
        for at, size in enumerate(shape):
            while not found[at] and size > 1 and missing:
                taken = [missing.pop(0)]
                while missing and math.prod(self.axes[axis] for axis in taken) < size:
                    taken.append(missing.pop(0))
                found[at] = tuple(taken)
        return tuple(found) if fits(found, shape, self.axes) else None

    def _inverse(self, node: fx.Node) -> fx.Node | float:
        divisor: Any = node.args[1]
        if not isinstance(divisor, fx.Node):
            return 1 / float(divisor)
        with self.step.graph.inserting_before(node):
            inverse = self.step.graph.call_function(aten.reciprocal.default, (divisor,))
        inverse.meta = divisor.meta
        return inverse

    def _sum(self, node: fx.Node, given: fx.Node) -> Linear | None:
        form = self.nodes[given]
        where = [int(number(dim)) % len(form.dims) for dim in node.args[1] or range(len(form.dims))]  # type: ignore[union-attr]
        keep = len(node.args) > 2 and bool(node.args[2])
        summed = frozenset(axis for dim in where for axis in form.dims[dim])
        left = tuple(() if dim in where else axes for dim, axes in enumerate(form.dims) if keep or dim not in where)
        return None if ROWS in summed or not summed else self._read(node, form, summed, left)

    def _product(self, node: fx.Node, given: fx.Node) -> Linear | None:
        """`query @ state`, or the state on the left; or an outer product with what was read."""
        form, right = self.nodes[given], given is node.args[1]
        other: Any = node.args[0] if right else node.args[1]
        if sizes(node.args[0])[2] == 1:  # type: ignore[arg-type]
            return self._times(node, given, other)
        batch, first, last = form.dims
        summed = first if right else last
        of_query: Dims = (batch, (), first) if right else (batch, last, ())
        left: Dims = (batch, (), last) if right else (batch, first, ())
        if not summed or not fits(of_query, sizes(other), self.axes):
            return None
        return self._read(node, form.times(Factor(other, of_query)), frozenset(summed), left)

    def _read(self, node: fx.Node, form: Linear, summed: frozenset[int], left: Dims) -> Linear | None:
        if form.decay is None:
            return None
        self.sums.append((node, form, summed, left))
        return Linear(left, None, (), (((), node),))

    def apart(self, product: Product) -> Product:
        return reduced([each for factor in product for each in factors_of(factor, self.axes)])

    def _independent(self, factors: Sequence[Factor], reads: Sequence[Read]) -> None:
        """Raises NoOpFits if a factor depends on what was read of the state."""
        dependent = depending_on(self.step.graph, [*self.nodes, *(read.node for read in reads)])
        if any(factor.node in dependent for factor in factors):
            raise NoOpFits("what is added to its state depends on what was read of it")


def _query(new: Linear, read: Linear, summed: bool) -> tuple[Product, bool, tuple[Product, ...]]:
    """What the new state is multiplied with, and False; or what the state before is, True, and what is added to that.

    Raises:
        NoOpFits: it is neither.
    """
    assert new.decay is not None and read.decay is not None
    query = without(read.decay, new.decay)
    if query is not None and _is_times(read, new, query):
        return query, False, ()
    if not summed or new.returned or (new.decay and query is not None):
        raise NoOpFits("it reads another state than its new one or the one before")
    return read.decay, True, read.added


def _is_times(form: Linear, of: Linear, factors: Product) -> bool:
    """Whether each term of a form is the other's, times these factors."""
    if (len(form.added), [node for _, node in form.returned]) != (len(of.added), [node for _, node in of.returned]):
        return False
    terms = ((*each.added, *(product for product, _ in each.returned)) for each in (form, of))
    return all(without(one, other) == factors for one, other in zip(*terms, strict=True))
