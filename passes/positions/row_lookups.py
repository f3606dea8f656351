"""Rows that a model makes for a whole call and then looks up at each token's own position: token t gets row t, which needs no lookup.

Before: c = table[:T].cos()[position_ids]       After: c = table[:T].cos().unsqueeze(0)
In a ragged row positions go beyond T, so that the lookup would fail; without it `row_values` makes the rows those of the batch's positions.
Declines: an index that is not, in any order of positions, the position of each token; rows or results that are changed in place.
"""

from __future__ import annotations

import torch
from torch import fx

from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import call_with_value, depends_on, shape_of, value_of, writers_of
from paged_attn.passes.fx.slicing import ancestors
from paged_attn.passes.fx.token_data import Lookup, lookup_of, token_axis, token_data
from paged_attn.passes.positions.row_probe import Affine, RowProbe

aten = torch.ops.aten
PROBED = (0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 4, 5, 6)  # positions of a ragged row: two sequences and a later part of one


def drop_lookups(graph: fx.Graph, form: CallForm, values: Values) -> None:
    """Rewrite in place."""
    data, writers = token_data(graph, form), writers_of(graph.nodes)
    for lookup in [lookup for node in graph.nodes if (lookup := lookup_of(node)) is not None]:
        mine = lookup.rows not in data and token_axis(lookup.rows, form) == lookup.axis
        if not mine or lookup.rows in writers or lookup.node in writers or not _is_position(lookup, form, values):
            continue
        lookup.node.replace_all_uses_with(_without(lookup, form))
        graph.erase_node(lookup.node)


def _is_position(lookup: Lookup, form: CallForm, values: Values) -> bool:
    """Whether the index is each token's position: on a ragged row of them, or, if the model numbers rows itself, 0, 1, ... in any call."""
    if token_axis(lookup.at, form) is None or any(size != 1 and not depends_on(size, form.num_tokens) for size in shape_of(lookup.at)):
        return False
    probe = RowProbe(form, values, lookup.node)
    try:
        if form.positions is None or form.positions not in ancestors(lookup.at, lookup.node, through_shapes=False):
            return probe.affine(lookup.at) == Affine(1, 0)
        positions = torch.tensor(PROBED, device=value_of(lookup.at).device)
        return torch.equal(probe.at(lookup.at, len(PROBED), {form.positions: positions[None]}).flatten().long(), positions)
    except (KeyError, IndexError, RuntimeError):  # it is made from the tokens, or cannot be evaluated
        return False


def _without(lookup: Lookup, form: CallForm) -> fx.Node:
    """The rows in the shape that the lookup gave them."""
    made = lookup.rows
    with lookup.node.graph.inserting_before(lookup.node):
        for offset, size in enumerate(shape_of(lookup.at)):
            if not depends_on(size, form.num_tokens):
                made = call_with_value(lookup.node.graph, aten.unsqueeze.default, made, lookup.axis + offset)
    return made
