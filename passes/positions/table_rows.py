"""A table of the model of which the first T rows are taken: `self.pe[:, :T]`, `weight[:T]`, `table.narrow(0, 2, T)`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import depends_on, name_of, value_of
from paged_attn.passes.fx.token_data import token_axis
from paged_attn.passes.positions.row_probe import Affine, RowProbe


class TableRows(NamedTuple):
    """Row i of the slice is row `rows.step * i + rows.start` along `axis` of `table`; `rest` is what else the indexing does."""

    table: fx.Node
    axis: int
    rows: Affine
    rest: tuple[Any, ...] | None


def table_rows(node: fx.Node, probe: RowProbe, form: CallForm) -> TableRows | None:
    """What a slice takes, or None if the node is no slice of T rows of a tensor whose shape does not depend on T.

    Found by slicing tables of row numbers, so that it holds for any contents.
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
    """How the result's rows count, if the table holds the row numbers along `axis`."""
    value = value_of(table)
    numbers = torch.arange(value.shape[axis], device=value.device)
    numbers = numbers.view([-1 if i == axis else 1 for i in range(value.dim())]).expand(tuple(value.shape))
    return probe.affine(node, {table: numbers})


def _without_token_slice(node: fx.Node, form: CallForm) -> tuple[Any, ...]:
    """The index of a getitem with everything of the sliced dimension kept, or of the one that a tensor of rows picks from."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    slices = [part for part in index if isinstance(part, slice) and _mentions_tokens(part, form)]
    picks = [part for part in index if isinstance(part, fx.Node) and isinstance(value_of(part), Tensor)]
    dropped = slices or (picks if len(picks) == 1 else [])
    return tuple(slice(None) if any(part is each for each in dropped) else part for part in index)


def _mentions_tokens(part: slice, form: CallForm) -> bool:
    return any(depends_on(value_of(end), form.num_tokens) for end in (part.start, part.stop) if end is not None)
