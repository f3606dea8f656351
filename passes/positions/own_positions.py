"""The passes on positions in their order, after attention was replaced: counted rows, made values, and how many positions there are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.find.attention_site import module_path
from paged_attn.passes.fx.call_form import CallForm, CallNotPaged, Values
from paged_attn.passes.fx.graph_tools import name_of, remove_dead_code, value_of
from paged_attn.passes.fx.token_data import backward_slice, token_axis
from paged_attn.passes.positions.batch_positions import BatchPositions
from paged_attn.passes.positions.position_limit import position_limit
from paged_attn.passes.positions.ragged_values import use_positions_for_row_values
from paged_attn.passes.positions.row_lookups import drop_lookups
from paged_attn.passes.positions.row_probe import RowProbe


class PositionsFound(NamedTuple):
    """How many values were redirected to the batch's positions, and how many positions the model has (None: no limit is known)."""

    redirected: int
    max_positions: int | None


def use_own_positions(graph: fx.Graph, form: CallForm, values: Values) -> PositionsFound:
    """Make every position that the model counts itself the batch's, in place.

    Raises:
        UnsupportedError: a value that depends on the row and is no function of positions.
        CallNotPaged: the same in a call without position_ids; the model may run with them.
    """
    drop_lookups(graph, form, values)
    positions = BatchPositions(graph, form)
    try:
        redirected = use_positions_for_row_values(graph, form, values, positions)
        _refuse_counted_tokens(graph, form, values)
    except UnsupportedError as refusal:
        if form.positions is None:
            raise CallNotPaged(str(refusal)) from refusal
        raise
    remove_dead_code(graph)
    limits = [form.max_tokens, position_limit(graph, form, values, positions)]
    return PositionsFound(redirected, min((limit for limit in limits if limit is not None), default=None))


def _refuse_counted_tokens(graph: fx.Graph, form: CallForm, values: Values) -> None:
    """Positions that a model counts from its tokens, as in `cumsum(ids != pad)`, since some ids would not count.

    Raises:
        UnsupportedError: a running sum along input_ids that counts ordinary tokens one by one, named by its module.
    """
    ids = form.input_ids
    for node in graph.nodes:
        if name_of(node) != "cumsum" or token_axis(node, form) is None:
            continue
        sliced = backward_slice(node, node)
        if ids not in sliced or any(other.op == "placeholder" and other is not ids and form.roles[other] == "owned" for other in sliced):
            continue
        length = 12
        numbers = torch.arange(20, 20 + length, device=value_of(ids).device).to(value_of(ids).dtype)[None]
        counted = RowProbe(form, values, node).at(node, length, {ids: numbers}).flatten()
        if counted.numel() == length and bool((counted.diff() == 1).all()):
            raise UnsupportedError(
                f"{module_path(node) or 'the model'}: {node.name} counts positions along input_ids with a running sum, in which some ids "
                "(padding) do not count; a ragged batch can not follow that. Call it with position_ids, if it takes them."
            )
