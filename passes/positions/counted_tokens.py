"""Positions that a model counts from its tokens, as in `cumsum(ids != pad)`: refused, since some ids would not count."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.find.attention_site import module_path
from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import name_of, value_of
from paged_attn.passes.fx.token_data import backward_slice, token_axis
from paged_attn.passes.positions.row_probe import RowProbe


def refuse_counted_tokens(graph: fx.Graph, form: CallForm, values: Values) -> None:
    """Find running sums over the row of input_ids.

    Raises:
        UnsupportedError: a sum that counts ordinary tokens one by one, named by its module.
    """
    ids = form.input_ids
    for node in graph.nodes:
        if name_of(node) != "cumsum" or not isinstance(value_of(node), Tensor) or token_axis(node, form) is None:
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
