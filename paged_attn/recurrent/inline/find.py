"""Reads from the graph of one token's step how a state follows from the one before, and what reads it.

A state of a linear recurrence is, whatever the layer is called, S' = decay * S + key^T value, and its output is query S'. Every node that
depends on S is followed: those that are S times something plus something, in any shape, and the product or sum that takes an axis away.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from paged_attn.recurrent.inline.dims import ROWS, Dims, SplitAxis, after_view, fits, number, sizes, viewed
from paged_attn.recurrent.inline.factors import Factor, factors_of, operand, reduced
from paged_attn.recurrent.inline.step_graph import TRACED_ROWS, StepGraph
from paged_attn.recurrent.program import NoOpFits

aten = torch.ops.aten
Product = tuple[Factor, ...]
_ORDERED = (aten.div.Tensor, aten.sub.Tensor)
_ELEMENTWISE = (aten.mul.Tensor, aten.add.Tensor, *_ORDERED)


@dataclass(frozen=True)
class Linear:
    """A node that is decay * S + the sum of `added`; it has all axes of the state, in the order of `dims`."""

    dims: Dims
    decay: Product = ()
    added: tuple[Product, ...] = ()

    def times(self, factor: Factor) -> Linear:
        return replace(self, decay=(*self.decay, factor), added=tuple((*each, factor) for each in self.added))


@dataclass(frozen=True)
class Read:
    """A node with what an op reads of the state, plus `more`, products that are summed over the same axes; what is left of the state's axes
    is in `dims`."""

    node: fx.Node
    dims: Dims
    more: tuple[Product, ...] = ()


@dataclass(frozen=True)
class Recurrence:
    """S' = the product of `decay`, times S, plus the product of `added`; `reads` are the product of `query` times S' (or S, if `before`),
    summed over `summed`. No factor depends on S.

    Attributes:
        state: its placeholder.
        axes: the size of each of its axes, and of the rows; an axis may be a part of a dimension.
        shape: the sizes of all its axes, also those of one.
    """

    state: fx.Node
    axes: Mapping[int, int]
    shape: tuple[int, ...]
    decay: Sequence[Factor]
    added: Sequence[Factor]
    query: Sequence[Factor]
    summed: frozenset[int]
    before: bool
    reads: Sequence[Read]

    @cached_property
    def heads(self) -> list[int]:
        """The axes along which keys, queries or decays differ; all, if the state is read as it is."""
        more = [factor for read in self.reads for product in read.more for factor in product if factor.axes & self.summed]
        apart = {axis for factor in (*self.of_keys, *more, *self.decay, *self.query) for axis in factor.axes} if self.summed else self.axes
        return [axis for axis in sorted(self.axes) if axis in apart and axis not in self.summed and axis != ROWS]

    @cached_property
    def of_keys(self) -> list[Factor]:
        """What is added, in part the keys; `of_values`: the rest."""
        return [factor for factor in self.added if factor.axes & self.summed]

    @cached_property
    def of_values(self) -> list[Factor]:
        return [factor for factor in self.added if not factor.axes & self.summed]

    @cached_property
    def keys(self) -> list[int]:
        return sorted(self.summed)

    @cached_property
    def values(self) -> list[int]:
        return [axis for axis in sorted(self.axes) if axis not in (ROWS, *self.heads, *self.keys)]


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
    dimensions = [[size] for size in sizes(step.states[index])[1:]]
    while True:
        try:
            return _Finder(step, index, dimensions).found()
        except _SplitDimension as other:
            dimensions = other.dimensions


class _Finder:
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
        self.whole: set[fx.Node] = set()  # nodes that are read as they are

    def found(self) -> Recurrence:
        for node in self.step.graph.nodes:
            if node.op == "call_function" and any(arg in self.nodes for arg in node.all_input_nodes):
                self._follow(node)
        if self.step.results[0] in self.nodes:
            self.whole.add(self.step.results[0])
        if self.new not in self.nodes:
            raise NoOpFits("its new state is no linear function of the state before")
        new = self.nodes[self.new]
        if new.dims != self.own or len(new.added) != 1:
            raise NoOpFits("its new state is not the state before times something, plus one product")
        reads = [*self.sums, *((node, self.nodes[node], frozenset[int](), self.nodes[node].dims) for node in self.whole)]
        if not reads:
            raise NoOpFits("nothing reads its state")
        queries = [_query(new, form, bool(summed)) for _, form, summed, _ in reads]
        ways = {(query, before, summed) for (query, before, _), (_, _, summed, _) in zip(queries, reads, strict=True)}
        if len(ways) > 1:
            raise NoOpFits("its state is read with several queries")
        ((query, before, summed),) = ways
        decay, added, query = (self._apart(product) for product in (new.decay, new.added[0], query))
        found = [Read(node, dims, tuple(map(self._apart, more))) for (node, _, _, dims), (_, _, more) in zip(reads, queries, strict=True)]
        self._independent([*decay, *added, *query], found)
        return Recurrence(self.state, self.axes, self.shape, decay, added, query, summed, before, found)

    def _follow(self, node: fx.Node) -> None:
        if node.target is operator.getitem or node.target is aten.sym_size.int:
            return
        given = [arg for arg in node.all_input_nodes if arg in self.nodes]
        if (shown := viewed(node)) is not None and given == [shown]:
            self._view(node, shown)
        elif len(given) == 1 and node.target in _ELEMENTWISE and len(node.args) == 2 and not node.kwargs:
            self._elementwise(node, given[0])
        elif node.target is aten.sum.dim_IntList:
            self._sum(node, given[0])
        elif node.target is aten.bmm.default and len(given) == 1:
            self._product(node, given[0])
        else:
            self.whole.update(given)

    def _elementwise(self, node: fx.Node, given: fx.Node) -> None:
        first, second = node.args
        if first is second or (first is not given and node.target in _ORDERED):
            self.whole.add(given)
        elif node.target is aten.div.Tensor:
            self._divide(node, given)
        else:
            other = second if first is given else first
            if node.target is aten.mul.Tensor:
                self._scale(node, given, other)
            else:
                self._add(node, given, other, -1.0 if node.target is aten.sub.Tensor else 1.0)

    def _view(self, node: fx.Node, shown: fx.Node) -> None:
        try:
            dims = after_view(node, self.nodes[shown].dims, self.axes)
        except SplitAxis as split:
            raise _SplitDimension(self._with_axis(split)) from None
        if dims is None:
            self.whole.add(shown)
        else:
            self.nodes[node] = replace(self.nodes[shown], dims=dims)

    def _with_axis(self, split: SplitAxis) -> list[list[int]]:
        numbers = itertools.count()
        return [
            [part for size in dimension for part in ([size // split.inner, split.inner] if next(numbers) == split.axis else [size])]
            for dimension in self.dimensions
        ]

    def _result_dims(self, node: fx.Node, given: fx.Node) -> Dims | None:
        """The dims of an elementwise result with the axes of the state alone, or None."""
        dims = self.nodes[given].dims
        dims = ((),) * (len(sizes(node)) - len(dims)) + dims
        return dims if fits(dims, sizes(node), self.axes) else None

    def _scale(self, node: fx.Node, given: fx.Node, factor: object) -> None:
        if (dims := self._result_dims(node, given)) is None:
            self.whole.add(given)
        else:
            self.nodes[node] = replace(self.nodes[given].times(operand(factor, dims)), dims=dims)

    def _divide(self, node: fx.Node, given: fx.Node) -> None:
        divisor: Any = node.args[1]
        if not isinstance(divisor, fx.Node):
            self._scale(node, given, 1 / divisor)
            return
        with self.step.graph.inserting_before(node):
            inverse = self.step.graph.call_function(aten.reciprocal.default, (divisor,))
        inverse.meta = divisor.meta
        self._scale(node, given, inverse)

    def _add(self, node: fx.Node, given: fx.Node, other: object, sign: float) -> None:
        if (dims := self._result_dims(node, given)) is None:
            self.whole.add(given)
            return
        before, more = self.nodes[given], reduced([Factor(sign), operand(other, dims)])
        self.nodes[node] = replace(before, dims=dims, added=(*before.added, more))

    def _sum(self, node: fx.Node, given: fx.Node) -> None:
        form = self.nodes[given]
        where = [int(number(dim)) % len(form.dims) for dim in node.args[1] or range(len(form.dims))]  # type: ignore[union-attr]
        keep = len(node.args) > 2 and bool(node.args[2])
        summed = frozenset(axis for dim in where for axis in form.dims[dim])
        left = tuple(() if dim in where else axes for dim, axes in enumerate(form.dims) if keep or dim not in where)
        if ROWS in summed or not summed:
            self.whole.add(given)
        else:
            self.sums.append((node, form, summed, left))

    def _product(self, node: fx.Node, given: fx.Node) -> None:
        """`query @ state`, or the state on the left."""
        form = self.nodes[given]
        batch, first, last = form.dims
        right = given is node.args[1]
        query, summed = (node.args[0], first) if right else (node.args[1], last)
        of_query: Dims = (batch, (), first) if right else (batch, last, ())
        left: Dims = (batch, (), last) if right else (batch, first, ())
        assert isinstance(query, fx.Node)
        if summed and fits(of_query, sizes(query), self.axes):
            self.sums.append((node, form.times(Factor(query, of_query)), frozenset(summed), left))
        else:
            self.whole.add(given)

    def _apart(self, product: Product) -> Product:
        return reduced([each for factor in product for each in factors_of(factor, self.axes)])

    def _independent(self, factors: Sequence[Factor], reads: Sequence[Read]) -> None:
        """Raises NoOpFits if a factor depends on what was read of the state."""
        dependent = {*self.nodes, *(read.node for read in reads)}
        for node in self.step.graph.nodes:
            if any(arg in dependent for arg in node.all_input_nodes):
                dependent.add(node)
        if any(factor.node in dependent for factor in factors):
            raise NoOpFits("what is added to its state depends on what was read of it")


def _query(new: Linear, read: Linear, summed: bool) -> tuple[Product, bool, tuple[Product, ...]]:
    """What the new state is multiplied with, and False; or what the state before is, True, and what is added to that.

    Raises:
        NoOpFits: it is neither.
    """
    query = _without(read.decay, new.decay)
    if query is not None and len(read.added) == 1 and _without(read.added[0], new.added[0]) == query:
        return query, False, ()
    if not summed or (new.decay and query is not None):
        raise NoOpFits("it reads another state than its new one or the one before")
    return read.decay, True, read.added


def _without(product: Product, part: Product) -> Product | None:
    """The factors of `product` that are not in `part`, or None if one of those is missing."""
    left = list(product)
    for factor in part:
        if factor not in left:
            return None
        left.remove(factor)
    return tuple(left)
