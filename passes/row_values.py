"""Values that a model makes for each row from nothing but the row's number become functions of the batch's positions.

Before: c = torch.cos(torch.arange(1, T + 1) * f); x = x * c       After: c = torch.cos((p + 1) * f); x = x * c
Before: x = x + self.table[:, :T]                                  After: x = x + self.table.index_select(1, p)
A value that is the same for every row and every length (token types of zero) stays; so does one that only picks rows of a
token-sized tensor (expert dispatch). Anything else whose rows differ would be wrong in a ragged row and is refused.
Every replacement is proved: on ragged positions it must give the rows that the old value has at those positions.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.attention_site import module_path
from paged_attn.passes.batch_positions import BatchPositions
from paged_attn.passes.call_form import CallForm
from paged_attn.passes.graph_tools import depends_on, value_of, writes_in_place, written_values
from paged_attn.passes.row_probe import Affine, RowProbe
from paged_attn.passes.table_rows import TableRows, table_rows
from paged_attn.passes.token_data import (
    UNDEFINED,
    Writers,
    cone_of,
    indexed_tensor,
    name_of,
    read_inputs,
    token_axis,
    token_data,
    writers_of,
)

aten = torch.ops.aten
_ARITHMETIC = {"add", "sub", "mul", "div", "truediv", "pow", "floordiv", "floor_divide", "true_divide", "remainder", "mod", "rsub", "iadd",
               "isub", "imul", "itruediv", "add_", "sub_", "mul_", "div_", "pow_", "maximum", "minimum", "clamp"}  # fmt: skip


def use_positions_for_row_values(graph: fx.Graph, form: CallForm, values: dict[fx.Node, Any], positions: BatchPositions) -> int:
    """Rewrite in place; returns how many values were replaced.

    Raises:
        UnsupportedError: a value whose rows differ and that is no function of positions, named by its module.
    """
    data = token_data(graph, form)
    shared = _Shared(form, values, positions, writers_of(graph))
    replaced: dict[tuple[fx.Node, ...], fx.Node] = {}
    harmless: set[tuple[fx.Node, ...]] = set()
    _check_written(graph, shared, data)
    _check_scaled(data, form)
    for user in list(graph.nodes):
        if user not in data and user.op != "output":
            continue
        for value in read_inputs(user):
            if value in data or not isinstance(value_of(value), Tensor) or value.op == "placeholder" or picks_rows(user, value, form):
                continue
            cone = (value, *cone_of(value, user, writers=shared.writers))
            if cone in harmless or not _counts_tokens(cone, form):
                continue
            if cone not in replaced:
                work = _Replacement(value, user, shared)
                if work.is_harmless():
                    harmless.add(cone)
                    continue
                replaced[cone] = work.make()
            user.replace_input_with(value, replaced[cone])
    return len(replaced)


def _counts_tokens(nodes: tuple[fx.Node, ...], form: CallForm) -> bool:
    """Whether something among the nodes depends on T: a size, or a tensor made of that size."""
    for node in nodes:
        value = value_of(node)
        if any(depends_on(size, form.num_tokens) for size in (value.shape if isinstance(value, Tensor) else ())) or _is_count(value, form):
            return True
    return False


def _is_count(value: Any, form: CallForm) -> bool:
    """Whether a number is made from T."""
    return isinstance(value, (torch.SymInt, torch.SymFloat)) and form.num_tokens in value.node.expr.free_symbols


def _check_scaled(data: set[fx.Node], form: CallForm) -> None:
    """No floating value of tokens may be computed with T as a number (a temperature of log T)."""
    for node in data:
        value = value_of(node)
        if name_of(node) in _ARITHMETIC and isinstance(value, Tensor) and value.dtype.is_floating_point:
            if counts := [other for other in node.all_input_nodes if _is_count(value_of(other), form)]:
                raise _refusal(counts[0], f"goes into the numbers of {node.name}")


def _check_written(graph: fx.Graph, shared: _Shared, data: set[fx.Node]) -> None:
    """What tokens are later written into must start as something harmless."""
    writers = [node for node in graph.nodes if node in data and writes_in_place(node)]
    for writer in writers:
        for start in written_values(writer):
            made_of_none = start.op != "placeholder" and not any(source in data for source in read_inputs(start))
            if made_of_none and name_of(start) not in UNDEFINED and not writes_in_place(start) and _counts_tokens((start,), shared.form):
                if not _Replacement(start, writer, shared).is_harmless():
                    raise _refusal(start, "is written over in part by values of tokens")


def picks_rows(user: fx.Node, value: fx.Node, form: CallForm, seen: set[fx.Node] | None = None) -> bool:
    """Whether `value` reaches, through `user`, nothing but places where it picks rows of token-sized tensors."""
    seen = set() if seen is None else seen
    if user in seen:
        return True
    seen.add(user)
    if user.op == "output" or value_of(value).dtype not in (torch.int64, torch.int32):
        return False
    indexed = indexed_tensor(user, value)
    if indexed is not None:
        return any(depends_on(size, form.num_tokens) for size in value_of(indexed).shape)
    if writes_in_place(user):  # inverse[permutation] = arange(rows)
        targets = [target for target in written_values(user) if target is not value]
        return bool(targets) and all(picks_rows(other, t, form, seen) for t in targets for other in t.users if other is not user)
    made = value_of(user)
    if not isinstance(made, Tensor) or made.dtype not in (torch.int64, torch.int32) or not user.users:
        return False
    return all(picks_rows(other, user, form, seen) for other in user.users)


@dataclass
class _Shared:
    """What all replacements in a graph share: what is known of its nodes, and what was made in front of earlier users."""

    form: CallForm
    values: dict[fx.Node, Any]
    positions: BatchPositions
    writers: Writers
    results: dict[tuple[fx.Node, int], Any] = field(default_factory=dict)
    tables: dict[fx.Node, TableRows | None] = field(default_factory=dict)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)


class _Replacement:
    """One value [.., T, ..] as one user reads it."""

    def __init__(self, value: fx.Node, user: fx.Node, shared: _Shared) -> None:
        self.value, self.user, self.form, self.positions, self.shared = value, user, shared.form, shared.positions, shared
        self.probe = RowProbe(shared.form, shared.values, user, shared.writers, shared.results)
        self.seeds: dict[fx.Node, Affine | TableRows] = {}

    def is_harmless(self) -> bool:
        return bool(self._tried(lambda: not self._varies(self.value)))

    def _varies(self, node: fx.Node) -> bool:
        """Whether something made of tensors differs from row to row, or with the number of rows."""
        value = value_of(node)
        if node.op in ("placeholder", "get_attr") or isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            return False
        # Probes see the first rows of a table only, so that what is taken off one counts as different.
        takes_rows = any(self._seed(other) is not None for other in self._cone(node))
        return takes_rows or not isinstance(value, Tensor) or not self.probe.is_constant(node)

    def make(self) -> fx.Node:
        """The same for a ragged row, in front of the user."""
        axis = token_axis(self.value, self.form)
        if axis is None:
            raise _refusal(self.value, "has values that depend on the number of tokens")
        self._tried(lambda: self._find_seeds(self.value, set()))
        if not self.seeds:
            raise _refusal(self.value, "differs from row to row or with that number")
        made: fx.Node = self._tried(self._rebuild)
        if not self._tried(lambda: self._agrees(made, axis)):
            raise _refusal(self.value, "depends on the number of tokens or on other rows besides its own")
        return made

    def _tried(self, work: Any) -> Any:
        try:
            return work()
        except (IndexError, RuntimeError, KeyError) as error:
            raise _refusal(self.value, f"can not be evaluated alone ({type(error).__name__}: {error})") from error

    def _seed(self, node: fx.Node) -> TableRows | None:
        if node not in self.shared.tables:
            self.shared.tables[node] = table_rows(node, self.probe, self.form)
        return self.shared.tables[node]

    def _cone(self, node: fx.Node, stop: frozenset[fx.Node] = frozenset()) -> list[fx.Node]:
        return cone_of(node, self.user, stop, self.shared.writers)

    def _find_seeds(self, node: fx.Node, seen: set[fx.Node]) -> None:
        """The places where rows are first counted, or taken off a table: what is made from them there (a remainder, a clamp) may count
        as far as probes see, and no further."""
        if node in seen or node.op == "placeholder":
            return
        seen.add(node)
        table = self._seed(node)
        if table is not None:
            self.seeds[node] = table
            return
        writers = [w for w in self._cone(node) if writes_in_place(w) and node in written_values(w)]
        inputs = [source for source in (*read_inputs(node), *writers) if source not in seen]
        varying = [source for source in inputs if self._varies(source)]
        counted = self.probe.affine(node) if not varying and isinstance(value_of(node), Tensor) else None
        if counted is not None:
            self.seeds[node] = counted
        for source in varying:
            self._find_seeds(source, seen)

    def _rebuild(self) -> fx.Node:
        graph = self.user.graph
        nodes = self._cone(self.value, frozenset(self.seeds))
        writers = [node for node in nodes if writes_in_place(node) and node not in self.seeds]
        if any(target.op == "placeholder" for writer in writers for target in written_values(writer)):
            raise _refusal(self.value, "changes a tensor of the model in place")
        env: dict[fx.Node, fx.Node] = {} if any(node in self.shared.writers for node in nodes) else self.shared.made
        with graph.inserting_before(self.user):
            for node in nodes:
                if node in env:
                    continue
                if node in self.seeds:
                    env[node] = self._seed_rows(node, self.seeds[node])
                elif node.op not in ("placeholder", "get_attr") and (writers or any(source in env for source in read_inputs(node))):
                    env[node] = graph.node_copy(node, lambda other: env.get(other, other))
        return env[self.value]

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
            value, axis = value_of(node), token_axis(node, self.form)
            assert axis is not None
            result = graph.call_function(aten._to_copy.default, (rows,), {"dtype": value.dtype}) if value.dtype != torch.int64 else rows
            if value.dim() > 1:
                result = graph.call_function(aten.view.default, (result, [-1 if i == axis else 1 for i in range(value.dim())]))
                sizes = [-1 if i == axis else size for i, size in enumerate(value.shape)]
                result = graph.call_function(aten.expand.default, (result, sizes)) if set(sizes) - {1, -1} else result
        result.meta = {**node.meta}
        return result

    def _agrees(self, made: fx.Node, axis: int) -> bool:
        """On a row of several requests: what each token gets is what it has in a call of its own."""
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


def _close(one: Tensor, other: Tensor) -> bool:
    """Equal but for the last bit of sines: whole numbers and truth values exactly."""
    if not one.dtype.is_floating_point and not one.dtype.is_complex:
        return torch.equal(one, other)
    limit = 1e-5 if one.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128) else 2e-2
    return torch.allclose(one, other, rtol=limit, atol=limit * 0.1, equal_nan=True)


def _refusal(node: fx.Node, what: str) -> UnsupportedError:
    where = module_path(node) or "the model's forward"
    return UnsupportedError(
        f"{where}: {node.name} is made from the number of tokens and {what}, so that it would be wrong in a ragged batch, where requests "
        "of all lengths share a row. Known are row numbers (arange), rows of a table, and functions of those one row at a time; "
        "compute it from position_ids instead."
    )
