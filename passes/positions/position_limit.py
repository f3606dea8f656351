"""How many positions a model has: the rows of the tables that it reads at positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import name_of, value_of
from paged_attn.passes.fx.token_data import backward_slice
from paged_attn.passes.positions.batch_positions import BatchPositions
from paged_attn.passes.positions.row_probe import RowProbe

_LONGEST_TABLE = 1 << 24


def position_limit(graph: fx.Graph, form: CallForm, values: Values, positions: BatchPositions) -> int | None:
    """The first position that some table lacks, or None if no table is read at positions, or positions never leave it."""
    limits = [
        limit
        for node in graph.nodes
        if (found := _lookup(node)) is not None and (limit := _first_outside(node, *found, form, values, positions)) is not None
    ]
    return min(limits, default=None)


def _lookup(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The index of a lookup in a table of fixed size, and the number of the table's rows."""
    if node.op != "call_function":
        return None
    if node.target is F.embedding:
        index, table, axis = node.args[0], node.args[1], 0
    elif name_of(node) == "index_select" and len(node.args) == 3:
        table, axis, index = node.args  # type: ignore[assignment]
    elif name_of(node) == "getitem":
        table, axis = node.args[0], 0
        index = node.args[1][0] if isinstance(node.args[1], tuple) and node.args[1] else node.args[1]
    else:
        return None
    if not isinstance(table, fx.Node) or not isinstance(index, fx.Node) or not isinstance(value_of(table), Tensor):
        return None
    if value_of(table).dim() == 0 or value_of(index).dtype not in (torch.int64, torch.int32):
        return None
    rows = value_of(table).shape[axis]
    return (index, rows) if isinstance(rows, int) and rows <= _LONGEST_TABLE else None


def _first_outside(user: fx.Node, index: fx.Node, rows: int, form: CallForm, values: Values, positions: BatchPositions) -> int | None:
    starts = frozenset(node for node in (form.positions, positions.made) if node is not None)
    sliced = backward_slice(index, user, starts)
    if not starts & set(sliced) or any(
        node.op == "placeholder" and form.roles[node] not in ("owned", "tokens", "position_ids") for node in sliced
    ):
        return None
    count = rows + 64  # what a learned table starts with (an offset) is far shorter
    numbers = torch.arange(count, device=value_of(index).device)
    given = {node: numbers[None] if node is form.positions else numbers for node in starts & set(sliced)}
    try:
        looked_up = RowProbe(form, values, user).at(index, count, given)
    except (RuntimeError, IndexError):
        return None  # the index is itself looked up, in a shorter table, which has its own limit
    if looked_up.numel() != count:
        return None
    outside = ((looked_up.flatten() >= rows) | (looked_up.flatten() < -rows)).nonzero()
    return int(outside[0]) if len(outside) else None
