"""The passes on positions in their order, after attention was replaced: counted rows, made values, and how many positions there are."""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.fx.call_form import CallForm, CallNotPaged, Values
from paged_attn.passes.fx.graph_tools import remove_dead_code
from paged_attn.passes.positions.batch_positions import BatchPositions
from paged_attn.passes.positions.id_values import check_id_values
from paged_attn.passes.positions.position_limit import position_limit
from paged_attn.passes.positions.ragged_values import use_positions_for_row_values
from paged_attn.passes.positions.row_lookups import drop_lookups


class PositionsFound(NamedTuple):
    """How many values were redirected to the batch's positions, and how many positions the model has (None: no limit is known)."""

    redirected: int
    max_positions: int | None


def use_own_positions(graph: fx.Graph, form: CallForm, values: Values) -> PositionsFound:
    """Make every position that the model counts itself the batch's, in place.

    Raises:
        UnsupportedError: a value that depends on the row and is no function of positions, or on the token ids of other rows.
        CallNotPaged: the same in a call without position_ids; the model may run with them.
    """
    drop_lookups(graph, form, values)
    positions = BatchPositions(graph, form)
    try:
        redirected = use_positions_for_row_values(graph, form, values, positions)
        remove_dead_code(graph)
        check_id_values(graph, form, values)
    except UnsupportedError as refusal:
        if form.positions is None:
            raise CallNotPaged(str(refusal)) from refusal
        raise
    limits = [form.max_tokens, position_limit(graph, form, values, positions)]
    return PositionsFound(redirected, min((limit for limit in limits if limit is not None), default=None))
