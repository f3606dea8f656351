"""The passes on positions, in order, run after attention was replaced: counted rows, values from them, number of positions."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.fx.call_form import CallForm, CallNotPaged, Values
from paged_attn.passes.fx.graph_tools import call_with_value, depends_on, embedding_of, name_of, shape_of, value_of
from paged_attn.passes.fx.memory import remove_dead_code, writers_of
from paged_attn.passes.fx.model_facts import least
from paged_attn.passes.fx.slicing import ancestors
from paged_attn.passes.fx.token_data import Lookup, lookup_of, token_axis, token_data
from paged_attn.passes.positions.batch_positions import BatchPositions
from paged_attn.passes.positions.id_values import check_id_values
from paged_attn.passes.positions.ragged_values import use_positions_for_row_values
from paged_attn.passes.positions.row_probe import Affine, RowProbe

_LONGEST_TABLE = 1 << 24
aten = torch.ops.aten
PROBED = (0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 4, 5, 6)  # positions of a ragged row: two sequences and the later part of a third


def use_own_positions(graph: fx.Graph, form: CallForm, values: Values, longest: int | None) -> tuple[int, int | None]:
    """Replaces every position that the model counts itself by the batch's, in place. Returns how many values now follow the batch's
    positions, and how many positions the model has (None: no known limit).

    Args:
        longest: the number of positions that the model states.

    Raises:
        UnsupportedError: a value depends on its row and is not a function of positions, or depends on the token ids of other rows.
        CallNotPaged: the same in a call without position_ids; the model may run with them.
    """
    drop_lookups(graph, form, values)
    positions = BatchPositions(graph, form)
    try:
        redirected = use_positions_for_row_values(graph, form, values, positions, longest)
        remove_dead_code(graph)
        check_id_values(graph, form, values)
    except UnsupportedError as refusal:
        if form.positions is None:
            raise CallNotPaged(str(refusal)) from refusal
        raise
    return redirected, least(form.max_tokens, _position_limit(graph, form, values, positions))


def _position_limit(graph: fx.Graph, form: CallForm, values: Values, positions: BatchPositions) -> int | None:
    """The first position that some table lacks; None if no table is indexed by positions, or all positions are in range."""
    limit: int | None = None
    for node in graph.nodes:
        if (found := _lookup(node)) is not None:
            limit = least(limit, _first_outside(node, *found, form, values, positions, limit))
    return limit


def _lookup(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The index of a lookup in a table of fixed size, and the table's number of rows."""
    if node.op not in ("call_function", "call_method"):
        return None
    if (looked_up := embedding_of(node)) is not None:
        (index, table), axis = looked_up, 0
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


def _first_outside(
    user: fx.Node, index: fx.Node, rows: int, form: CallForm, values: Values, positions: BatchPositions, first_lacking: int | None
) -> int | None:
    """`first_lacking`: the first position that earlier tables lack, of which the index may be made."""
    starts = frozenset(node for node in (form.positions, positions.made) if node is not None)
    sliced = ancestors(index, user, starts, through_shapes=False)
    if not starts & set(sliced) or any(
        node.op == "placeholder" and form.roles[node] not in ("owned", "tokens", "position_ids") for node in sliced
    ):
        return None
    count = rows + 64  # a learned table has far fewer rows before that of position 0
    count = count if first_lacking is None else min(count, first_lacking)
    numbers = torch.arange(count, device=value_of(index).device)
    given = {node: numbers[None] if node is form.positions else numbers for node in starts & set(sliced)}
    try:
        looked_up = RowProbe(form, values, user).at(index, count, given)
    except (RuntimeError, IndexError):
        return None
    if looked_up.numel() != count:
        return None
    outside = ((looked_up.flatten() >= rows) | (looked_up.flatten() < -rows)).nonzero()
    return int(outside[0]) if len(outside) else None


def drop_lookups(graph: fx.Graph, form: CallForm, values: Values) -> None:
    """Removes lookups, at each token's own position, in rows that a model makes for a whole call: token t gets row t.

    Before: c = table[:T].cos()[position_ids]       After: c = table[:T].cos().unsqueeze(0)
    In a ragged row positions can exceed T, so the lookup would fail. Without it `ragged_values` takes the rows at the batch's positions.
    Declines: an index that is not each token's position, whatever the order of positions; rows or results that are changed in place.
    """
    data, writers = token_data(graph, form), writers_of(graph.nodes)
    for lookup in [lookup for node in graph.nodes if (lookup := lookup_of(node)) is not None]:
        mine = lookup.rows not in data and token_axis(lookup.rows, form) == lookup.axis
        if not mine or lookup.rows in writers or lookup.node in writers or not _is_position(lookup, form, values):
            continue
        lookup.node.replace_all_uses_with(_without(lookup, form))
        graph.erase_node(lookup.node)


def _is_position(lookup: Lookup, form: CallForm, values: Values) -> bool:
    """Whether the index is each token's position: tried on a ragged row or, if the model counts rows itself, 0, 1, ... in any call."""
    if token_axis(lookup.at, form) is None or any(size != 1 and not depends_on(size, form.num_tokens) for size in shape_of(lookup.at)):
        return False
    probe = RowProbe(form, values, lookup.node)
    try:
        if form.positions is None or form.positions not in ancestors(lookup.at, lookup.node, through_shapes=False):
            return probe.affine(lookup.at) == Affine(1, 0)
        positions = torch.tensor(PROBED, device=value_of(lookup.at).device)
        return torch.equal(probe.at(lookup.at, len(PROBED), {form.positions: positions[None]}).flatten().long(), positions)
    except (KeyError, IndexError, RuntimeError):  # it depends on the tokens, or cannot be evaluated
        return False


def _without(lookup: Lookup, form: CallForm) -> fx.Node:
    """The rows, in the shape of the lookup's result."""
    made = lookup.rows
    with lookup.node.graph.inserting_before(lookup.node):
        for offset, size in enumerate(shape_of(lookup.at)):
            if not depends_on(size, form.num_tokens):
                made = call_with_value(lookup.node.graph, aten.unsqueeze.default, made, lookup.axis + offset)
    return made
