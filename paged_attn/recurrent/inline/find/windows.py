"""Reads from the graph of one token's step a state that holds the last tokens' rows, and the causal convolution over them.

S' is S without its oldest row, and with the new one; what reads it are sums of the last rows times weights, one for each channel and tap.
A single old row that is read as it is (a token shift) is such a sum, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from paged_attn.recurrent.inline.find.dims import ROWS, Dims, SplitAxis, after_view, fits, number, sizes, viewed
from paged_attn.recurrent.inline.find.factors import Factor, operand
from paged_attn.recurrent.inline.find.forms import Read
from paged_attn.recurrent.inline.step_graph import TRACED_ROWS, StepGraph
from paged_attn.recurrent.program import NoOpFits

aten = torch.ops.aten
Column = int | Factor  # the index of an old row, the oldest first, or the new row


@dataclass(frozen=True)
class Columns:
    """A node that holds some rows of all channels: along the dimension with the axis of taps, or (one row) without one; times `weights`."""

    dims: Dims
    columns: tuple[Column, ...]
    weights: Factor | None = None


@dataclass(frozen=True)
class Window:
    """A state [channels, width] that a convolution reads.

    Attributes:
        axes, shape: as of `forms.Recurrence`; `taps`: which axis is the window, None for a state of a single row.
        new: the row that is added.
        weights: a factor with the axes of channels and taps; or the index of the one old row that is read.
        count: how many rows the convolution reads, the new one included.
    """

    axes: dict[int, int]
    shape: tuple[int, ...]
    taps: int | None
    new: Factor
    weights: Factor | int
    count: int
    reads: Sequence[Read]

    @property
    def channels(self) -> list[int]:
        return [axis for axis in sorted(self.axes) if axis not in (ROWS, self.taps)]

    @property
    def width(self) -> int:
        return 1 if self.taps is None else self.axes[self.taps]


def window_of(step: StepGraph, index: int) -> Window:
    """The window that a state is.

    Raises:
        NoOpFits: it is none.
    """
    shape = sizes(step.states[index])[1:]
    for taps in (*reversed([axis for axis, size in enumerate(shape) if size > 1]), None):
        finder = _Finder(step, index, taps)
        try:
            found = finder.found()
        except SplitAxis:
            found = None
        if found is not None:
            return found
    raise NoOpFits("its state does not hold the last tokens")


class _Finder:
    def __init__(self, step: StepGraph, index: int, taps: int | None) -> None:
        self.step, self.new, self.taps = step, step.results[1 + index], taps
        self.shape = sizes(step.states[index])[1:]
        self.axes = {ROWS: TRACED_ROWS, **{axis: size for axis, size in enumerate(self.shape) if size > 1}}
        self.width = 1 if taps is None else self.axes[taps]
        dims: Dims = ((ROWS,), *((axis,) if size > 1 else () for axis, size in enumerate(self.shape)))
        self.own = Columns(dims, tuple(range(self.width)))
        self.nodes: dict[fx.Node, Columns] = {step.states[index]: self.own}
        self.sums: list[tuple[fx.Node, Columns, Dims]] = []
        self.whole: set[fx.Node] = set()

    def found(self) -> Window | None:
        for node in self.step.graph.nodes:
            given = [arg for arg in node.all_input_nodes if arg in self.nodes]
            if node.op != "call_function" or not given or node.target is aten.sym_size.int:
                continue
            followed = self._follow(node, given[0]) if len(given) == 1 else None
            if followed is not None:
                self.nodes[node] = followed
            elif not self.sums or self.sums[-1][0] is not node:
                self.whole.update(given)
        after = self.nodes.get(self.new)
        if after is None and self.width == 1 and fits(self.own.dims, sizes(self.new), self.axes):
            after = replace(self.own, columns=(Factor(self.new, self.own.dims),))
        if after is None or after.weights is not None or after.dims != self.own.dims or self.step.results[0] in self.nodes:
            return None
        *old, new = after.columns
        if not isinstance(new, Factor) or old != list(range(1, self.width)):
            return None
        return self._window(new)

    def _window(self, new: Factor) -> Window | None:
        line: list[Column] = [*range(self.width), new]
        weights, count, reads = set[Factor | int](), 0, list[Read]()
        for node in self.whole:
            form = self.nodes[node]
            if form.weights is not None or len(form.columns) != 1 or not isinstance(form.columns[0], int):
                return None
            weights.add(form.columns[0])
            count = self.width + 1
            reads.append(Read(node, form.dims))
        for node, form, left in self.sums:
            if list(form.columns) != line[-len(form.columns) :] or form.weights is None:
                return None
            weights.add(form.weights)
            count = len(form.columns)
            reads.append(Read(node, left))
        if len(weights) != 1 or self._depends([new, *weights], reads):
            return None
        return Window(self.axes, self.shape, self.taps, new, weights.pop(), count, reads)

    def _depends(self, factors: Sequence[Factor | int], reads: Sequence[Read]) -> bool:
        """Whether what is added, or a weight, depends on what was read."""
        dependent = {*self.nodes, *(read.node for read in reads)}
        for node in self.step.graph.nodes:
            if any(arg in dependent for arg in node.all_input_nodes):
                dependent.add(node)
        return any(isinstance(each, Factor) and each.node in dependent for each in factors)

    def _axes(self, form: Columns) -> dict[int, int]:
        """The sizes of axes in a node that holds so many rows."""
        if self.taps is None:
            return self.axes
        return {axis: len(form.columns) if axis == self.taps else size for axis, size in self.axes.items()}

    def _along(self, form: Columns, dim: int) -> bool:
        """Whether a dimension is that of the rows."""
        return form.dims[dim] == ((self.taps,) if len(form.columns) > 1 else ())

    def _follow(self, node: fx.Node, given: fx.Node) -> Columns | None:
        """What a node holds; None if it reads (then it may be the last of `sums`)."""
        form = self.nodes[given]
        if form.weights is not None:
            self._sum(node, form)
            return None
        if node.target is aten.cat.default:
            return self._joined(node, given, form)
        if node.target is aten.slice.Tensor:
            dim, start, end, *_ = map(number, (*node.args[1:], *(0, 0, None)[len(node.args) - 1 :]))
            if len(node.args) < 5 and self._along(form, dim) and len(form.columns) > 1:
                return self._kept(form, dim, form.columns[start:end])
        if node.target is aten.select.int:
            dim, at = (int(number(each)) for each in node.args[1:])
            if form.dims[dim] == (self.taps,):
                columns = form.columns[at : at + 1] if at >= 0 else form.columns[at:][:1]
                return Columns(form.dims[:dim] + form.dims[dim % len(form.dims) + 1 :], columns)
        if node.target is aten.roll.default and len(node.args) == 3 and len(node.args[2]) == 1:  # type: ignore[arg-type]
            by, (dim,) = int(node.args[1][0]) % len(form.columns), node.args[2]  # type: ignore[arg-type, index, misc]
            if self._along(form, int(dim)):  # type: ignore[arg-type]
                return replace(form, columns=form.columns[-by:] + form.columns[:-by] if by else form.columns)
        if node.target in (aten.select_scatter.default, aten.slice_scatter.default) and given is node.args[0]:
            return self._written(node, form)
        if viewed(node) is given:
            dims = after_view(node, form.dims, self._axes(form))
            return None if dims is None else replace(form, dims=dims)
        if node.target is aten.mul.Tensor and len(form.columns) > 1:
            return self._weighted(node, given, form)
        if node.target in (aten.bmm.default, aten.convolution.default):
            self._product(node, given, form)
        return None

    def _kept(self, form: Columns, dim: int, columns: tuple[Column, ...]) -> Columns | None:
        if not columns:
            return None
        dims = list(form.dims)
        dims[dim] = (self.taps,) if len(columns) > 1 else ()  # type: ignore[assignment]
        return Columns(tuple(dims), columns)

    def _joined(self, node: fx.Node, given: fx.Node, form: Columns) -> Columns | None:
        parts, dim = node.args[0], int(number(node.args[1])) if len(node.args) > 1 else 0
        dim %= len(form.dims)
        if self.taps is None or not self._along(form, dim):
            return None
        columns = list[Column]()
        for part in parts:  # type: ignore[union-attr]
            if part is given:
                columns += form.columns
            elif not isinstance(part, fx.Node) or sizes(part)[dim] != 1:
                return None
            else:
                columns.append(Factor(part, (*form.dims[:dim], (), *form.dims[dim + 1 :])))
        dims = list(form.dims)
        dims[dim] = (self.taps,)
        return Columns(tuple(dims), tuple(columns))

    def _written(self, node: fx.Node, form: Columns) -> Columns | None:
        source, dim, *where = node.args[1:]
        if not isinstance(source, fx.Node) or not self._along(form, int(number(dim))):
            return None
        dim = int(number(dim)) % len(form.dims)
        columns, whole = list(form.columns), node.target is aten.slice_scatter.default
        start = int(number(where[0])) if where and where[0] is not None else 0
        at = start if start >= 0 else start + len(columns)
        if whole and (len(where) > 2 or sizes(source)[dim] != 1):
            return None
        columns[at] = Factor(source, (*form.dims[:dim], *(((),) if whole else ()), *form.dims[dim + 1 :]))
        return replace(form, columns=tuple(columns))

    def _weighted(self, node: fx.Node, given: fx.Node, form: Columns) -> Columns | None:
        first, second = node.args
        dims = ((),) * (len(sizes(node)) - len(form.dims)) + form.dims
        if first is second or not fits(dims, sizes(node), self._axes(form)):
            return None
        weights = operand(second if first is given else first, dims)
        return None if ROWS in weights.axes or not weights.dims else Columns(dims, form.columns, weights)

    def _sum(self, node: fx.Node, form: Columns) -> None:
        if node.target is not aten.sum.dim_IntList or len(node.args[1]) != 1:  # type: ignore[arg-type]
            return
        dim = int(number(node.args[1][0])) % len(form.dims)  # type: ignore[index]
        keep = len(node.args) > 2 and bool(node.args[2])
        if form.dims[dim] == (self.taps,):
            self.sums.append((node, form, (*form.dims[:dim], *(((),) if keep else ()), *form.dims[dim + 1 :])))

    def _product(self, node: fx.Node, given: fx.Node, form: Columns) -> None:
        weights = node.args[1]
        if given is not node.args[0] or not isinstance(weights, fx.Node) or form.dims[-1] != (self.taps,):
            return
        if node.target is aten.bmm.default:
            factor = Factor(weights, (form.dims[0], form.dims[2], ()))
            if sizes(weights)[2] == 1 and ROWS not in factor.axes:
                self.sums.append((node, replace(form, weights=factor), (*form.dims[:2], ())))
            return
        _, _, bias, stride, padding, dilation, transposed, _, groups = node.args
        plain = (bias, list(stride), list(padding), list(dilation), transposed) == (None, [1], [0], [1], False)  # type: ignore[arg-type]
        channels = math.prod(self._axes(form)[axis] for axis in form.dims[1])
        if plain and form.dims[0] == (ROWS,) and groups == channels == sizes(weights)[0] and sizes(weights)[2] == len(form.columns):
            factor = Factor(weights, (form.dims[1], (), form.dims[2]))
            self.sums.append((node, replace(form, weights=factor), (*form.dims[:2], ())))
