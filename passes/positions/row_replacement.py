"""Recomputes one value [.., T, ..] for a ragged row from the batch's positions, and proves it."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedModule
from paged_attn.passes.find.attention_site import module_path
from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import depends_on, name_of, value_of
from paged_attn.passes.fx.memory import Writers, writes_in_place, written_values
from paged_attn.passes.fx.slicing import ancestors
from paged_attn.passes.fx.token_data import read_inputs, token_axis
from paged_attn.passes.positions.batch_positions import BatchPositions
from paged_attn.passes.positions.row_probe import Affine, Results, RowProbe

aten = torch.ops.aten


@dataclass
class RowFacts:
    """State shared by all replacements in a graph: facts about its nodes, and nodes made for earlier users."""

    form: CallForm
    values: Values
    positions: BatchPositions
    writers: Writers
    longest: int | None = None  # the number of positions that the model states
    results: Results = field(default_factory=dict)
    tables: dict[fx.Node, TableRows | None] = field(default_factory=dict)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)


class RowReplacement:
    """One value [.., T, ..] as one user reads it."""

    def __init__(self, value: fx.Node, user: fx.Node, shared: RowFacts) -> None:
        self.value, self.user, self.form, self.positions, self.shared = value, user, shared.form, shared.positions, shared
        self.probe = RowProbe(shared.form, shared.values, user, shared.writers, shared.results)
        self.seeds: dict[fx.Node, Affine | TableRows] = {}

    def is_harmless(self) -> bool:
        return bool(self._tried(lambda: not self._varies(self.value)))

    def check_farther(self) -> None:
        """Raises UnsupportedError if rows differ between a short and a long call."""
        short = self._tried(lambda: self.probe.lengths(self.value)[1])
        for length in self.probe.farther(self.value, self.shared.longest):
            try:
                far = self.probe.at(self.value, length)
            except (IndexError, RuntimeError, KeyError):
                return  # the model has fewer positions
            near = self.probe.at(self.value, short)
            if length > short and isinstance(near, Tensor) and not _close(near, _beginning(far, near)):
                raise refusal(self.value, f"differs between a call of {length} tokens and one of {short}")

    def _varies(self, node: fx.Node) -> bool:
        """Whether a value differs from row to row, or with the number of rows."""
        value = value_of(node)
        if node.op in ("placeholder", "get_attr") or isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            return False
        # Probes see only the first rows: slices of a table and counted rows may differ later (a scale that is 1 up to row 8,191).
        tensors = [other for other in self._sliced(node) if isinstance(value_of(other), Tensor)]
        counts_rows = any(self._seed(other) is not None or self.probe.affine(other) is not None for other in tensors)
        return counts_rows or not isinstance(value, Tensor) or not self.probe.is_constant(node)

    def make(self) -> fx.Node:
        """The value for a ragged row, inserted before the user."""
        axis = token_axis(self.value, self.form)
        if axis is None:
            raise refusal(self.value, "has values that depend on the number of tokens")
        self._tried(lambda: self._find_seeds(self.value, set()))
        if not self.seeds:
            raise refusal(self.value, "differs from row to row or with that number")
        made: fx.Node = self._tried(self._rebuild)
        if not self._tried(lambda: self._agrees(made, axis)):
            raise refusal(self.value, "depends on the number of tokens or on other rows besides its own")
        return made

    def _tried(self, work: Any) -> Any:
        try:
            return work()
        except (IndexError, RuntimeError, KeyError) as error:
            raise refusal(self.value, f"cannot be evaluated by itself ({type(error).__name__}: {error})") from error

    def _seed(self, node: fx.Node) -> TableRows | None:
        if node not in self.shared.tables:
            self.shared.tables[node] = table_rows(node, self.probe, self.form)
        return self.shared.tables[node]

    def _sliced(self, node: fx.Node, stop: frozenset[fx.Node] = frozenset()) -> list[fx.Node]:
        return ancestors(node, self.user, stop, self.shared.writers, through_shapes=False)

    def _find_seeds(self, node: fx.Node, seen: set[fx.Node]) -> None:
        """Collects the nodes where rows are first counted or sliced from a table. Values made from them (a remainder, a clamp) may look
        like counted rows only within the probes' lengths."""
        if node in seen or node.op == "placeholder":
            return
        seen.add(node)
        table = self._seed(node)
        if table is not None:
            self.seeds[node] = table
            return
        writers = [w for w in self._sliced(node) if node in written_values(w)]
        inputs = [source for source in (*read_inputs(node), *writers) if source not in seen]
        varying = [source for source in inputs if self._varies(source)]
        axis = self._counted_axis(node) if not varying else None
        counted = self.probe.affine_along(node, axis) if axis is not None else None
        if counted is not None:
            self.seeds[node] = counted
        for source in varying:
            self._find_seeds(source, seen)

    def _counted_axis(self, node: fx.Node) -> int | None:
        """The one dimension that depends on T; it may have more than T rows, if a table is made longer than the call."""
        value = value_of(node)
        if not isinstance(value, Tensor) or value.dtype == torch.bool:
            return None
        axes = [axis for axis, size in enumerate(value.shape) if depends_on(size, self.form.num_tokens)]
        return axes[0] if len(axes) == 1 else None

    def _rebuild(self) -> fx.Node:
        graph = self.user.graph
        nodes = self._sliced(self.value, frozenset(self.seeds))
        writers = [node for node in nodes if writes_in_place(node) and node not in self.seeds]
        if any(target.op == "placeholder" for writer in writers for target in written_values(writer)):
            raise refusal(self.value, "changes a tensor of the model in place")
        env: dict[fx.Node, fx.Node] = {} if any(node in self.shared.writers for node in nodes) else self.shared.made
        with graph.inserting_before(self.user):
            for node in nodes:
                if node in env:
                    continue
                if node in self.seeds:
                    env[node] = self._seed_rows(node, self.seeds[node])
                elif node.op not in ("placeholder", "get_attr") and (writers or any(source in env for source in read_inputs(node))):
                    env[node] = graph.node_copy(node, lambda other: env.get(other, other))
                    self._of_tokens(env[node])
        return env[self.value]

    def _of_tokens(self, node: fx.Node) -> None:
        """Cuts the example value to T rows, if a table was longer."""
        axis, value = self._counted_axis(node), value_of(node)
        if axis is not None and token_axis(node, self.form) is None:
            tokens = value_of(self.positions.node).shape[0]
            node.meta["example_value"] = value.new_empty([tokens if i == axis else size for i, size in enumerate(value.shape)])

    def _seed_rows(self, node: fx.Node, seed: Affine | TableRows) -> fx.Node:
        graph = self.user.graph
        rows = self.positions.node
        step, start = seed.rows if isinstance(seed, TableRows) else seed
        for operation, number, neutral in ((aten.mul.Tensor, step, 1), (aten.add.Tensor, start, 0)):
            if number != neutral:
                rows = graph.call_function(operation, (rows, number))
                rows.meta["example_value"] = value_of(self.positions.node)
        if isinstance(seed, TableRows):
            taken = graph.call_function(aten.index_select.default, (seed.table, seed.axis, rows))
            result = graph.call_function(operator.getitem, (taken, seed.rest)) if seed.rest is not None else taken
        else:
            value, axis = value_of(node), self._counted_axis(node)
            assert axis is not None
            result = graph.call_function(aten._to_copy.default, (rows,), {"dtype": value.dtype}) if value.dtype != torch.int64 else rows
            if value.dim() > 1:
                result = graph.call_function(aten.view.default, (result, [-1 if i == axis else 1 for i in range(value.dim())]))
                sizes = [-1 if i == axis else size for i, size in enumerate(value.shape)]
                result = graph.call_function(aten.expand.default, (result, sizes)) if set(sizes) - {1, -1} else result
        result.meta = {**node.meta}
        self._of_tokens(result)
        return result

    def _agrees(self, made: fx.Node, axis: int) -> bool:
        """Whether, on a row of several requests, each token gets the same value as in a call of its own."""
        short, long = self.probe.lengths(self.value)
        device = value_of(self.value).device
        ragged = torch.cat([torch.arange(short), torch.arange(long), torch.arange(short // 2, short)]).to(device)
        new = RowProbe(self.form, self.probe.values, self.user).at(made, len(ragged), {self.positions.node: ragged})
        for length in (short, long):
            inside = (ragged < length).nonzero().flatten()
            expected = self.probe.at(self.value, length).index_select(axis, ragged[inside])
            got = new.index_select(axis, inside)
            if got.dtype != expected.dtype or got.shape != expected.shape or not _close(got, expected):
                return False
        return True


def _beginning(far: Tensor, near: Tensor) -> Tensor:
    """`far`, cut to the shape of `near`."""
    for axis, size in enumerate(near.shape):
        far = far.narrow(axis, 0, min(size, far.shape[axis]))
    return far


def _close(one: Tensor, other: Tensor) -> bool:
    """Equal up to the last bit of sines; integers and booleans exactly."""
    if not one.dtype.is_floating_point and not one.dtype.is_complex:
        return torch.equal(one, other)
    limit = 1e-5 if one.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128) else 2e-2
    return torch.allclose(one, other, rtol=limit, atol=limit * 0.1, equal_nan=True)


class MadeOfLength(UnsupportedModule):
    """`module` makes a value from the number of tokens in a way that has no row for each token."""


def refusal(node: fx.Node, what: str) -> MadeOfLength:
    module = module_path(node)
    where = module or "the model's forward"
    return MadeOfLength(
        module,
        f"{where}: {node.name} is made from the number of tokens and {what}, so that it would be wrong in a ragged batch, where requests "
        "of all lengths share a row. Known are row numbers (arange), rows of a table, and functions of those one row at a time; "
        "compute it from position_ids instead.",
    )


class TableRows(NamedTuple):
    """Row i of the slice is row `rows.step * i + rows.start` along `axis` of `table`; `rest` is the remaining part of the index."""

    table: fx.Node
    axis: int
    rows: Affine
    rest: tuple[Any, ...] | None


def table_rows(node: fx.Node, probe: RowProbe, form: CallForm) -> TableRows | None:
    """The rows that a slice takes; None if the node is not a slice of T rows of a tensor whose shape does not depend on T.

    Found by slicing tables of row numbers, so it holds for any contents.
    """
    if name_of(node) not in ("getitem", "narrow", "__getitem__") or node.kwargs:
        return None
    table = node.args[0] if node.args else None
    if not isinstance(table, fx.Node) or not isinstance(value_of(table), Tensor) or token_axis(node, form) is None:
        return None
    sizes = value_of(table).shape
    if any(not isinstance(size, int) for size in sizes):
        return None
    varying = [(axis, rows) for axis in range(len(sizes)) if (rows := _rows_along(node, axis, table, probe)) is not None]
    if len(varying) != 1:
        return None
    axis, rows = varying[0]
    return TableRows(table, axis, rows, _without_token_slice(node, form) if name_of(node) != "narrow" else None)


def _rows_along(node: fx.Node, axis: int, table: fx.Node, probe: RowProbe) -> Affine | None:
    """How the result counts rows if the table holds the row numbers along `axis`."""
    value = value_of(table)
    numbers = torch.arange(value.shape[axis], device=value.device)
    numbers = numbers.view([-1 if i == axis else 1 for i in range(value.dim())]).expand(tuple(value.shape))
    return probe.affine(node, {table: numbers})


def _without_token_slice(node: fx.Node, form: CallForm) -> tuple[Any, ...]:
    """The index of a getitem with the sliced dimension kept whole, also if a tensor of rows picks from it."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    slices = [part for part in index if isinstance(part, slice) and _mentions_tokens(part, form)]
    picks = [part for part in index if isinstance(part, fx.Node) and isinstance(value_of(part), Tensor)]
    dropped = slices or (picks if len(picks) == 1 else [])
    return tuple(slice(None) if any(part is each for each in dropped) else part for part in index)


def _mentions_tokens(part: slice, form: CallForm) -> bool:
    return any(depends_on(value_of(end), form.num_tokens) for end in (part.start, part.stop) if end is not None)
