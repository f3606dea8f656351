"""Values that a model makes for each row from nothing but the row's number become functions of the batch's positions.

Before: c = torch.cos(torch.arange(1, T + 1) * f); x = x * c       After: c = torch.cos((p + 1) * f); x = x * c
Before: x = x + self.table[:, :T]                                  After: x = x + self.table.index_select(1, p)
A value that is the same for every row and every length (token types of zero) stays; so does one that only picks rows of a
token-sized tensor (expert dispatch). Any other value whose rows differ would be wrong in a ragged row and is refused.
Every replacement is proved: on ragged positions it must give the rows that the old value has at those positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import name_of, token_dims, value_of
from paged_attn.passes.fx.memory import writers_of, writes_in_place, written_values
from paged_attn.passes.fx.slicing import ancestors
from paged_attn.passes.fx.token_data import (
    UNDEFINED,
    counts_in_numbers,
    indexed_tensor,
    is_count,
    lookup_of,
    read_inputs,
    token_axis,
    token_data,
)
from paged_attn.passes.positions.batch_positions import BatchPositions
from paged_attn.passes.positions.row_replacement import RowFacts, RowReplacement, refusal


def use_positions_for_row_values(
    graph: fx.Graph, form: CallForm, values: Values, positions: BatchPositions, longest: int | None = None
) -> int:
    """Rewrites the graph in place; returns how many values were replaced.

    Args:
        longest: the number of positions that the model states.

    Raises:
        UnsupportedError: a value whose rows differ is not a function of positions; the message names its module.
    """
    data = token_data(graph, form)
    shared = RowFacts(form, values, positions, writers_of(graph.nodes), longest)
    replaced: dict[tuple[fx.Node, ...], fx.Node] = {}
    harmless: set[tuple[fx.Node, ...]] = set()
    _check_written(shared, data)
    _check_scaled(data, form)
    for reader in list(graph.nodes):
        if reader not in data and reader.op != "output":
            continue
        for user, value in (_as_traced(reader, each) for each in read_inputs(reader) if each not in data):
            if value in data or not isinstance(value_of(value), Tensor) or value.op == "placeholder" or picks_rows(user, value, form):
                continue
            sliced = (value, *ancestors(value, user, writers=shared.writers, through_shapes=False))
            if sliced in harmless or not _counts_tokens(sliced, form):
                continue
            if sliced not in replaced:
                work = RowReplacement(value, user, shared)
                if work.is_harmless():
                    work.check_farther()
                    harmless.add(sliced)
                    continue
                if (lookup := lookup_of(user)) is not None and lookup.rows is value and token_axis(value, form) == lookup.axis:
                    raise refusal(value, "is indexed by something other than each token's position")
                replaced[sliced] = work.make()
                work.check_farther()
            user.replace_input_with(value, replaced[sliced])
    return len(replaced)


def _as_traced(user: fx.Node, value: fx.Node) -> tuple[fx.Node, fx.Node]:
    """An op's operand before it was brought into the op's layout by nodes without example values, and the first of these."""
    while value_of(value) is None and value.op == "call_function" and (sources := read_inputs(value)):
        user, value = value, sources[0]
    return user, value


def _counts_tokens(nodes: tuple[fx.Node, ...], form: CallForm) -> bool:
    """Whether a node among them depends on T: a size, or a tensor with such a size."""
    return any(token_dims(node, form.num_tokens) or is_count(value_of(node), form) for node in nodes)


def _check_scaled(data: set[fx.Node], form: CallForm) -> None:
    """Refuses floating-point values of tokens that are computed with T as a number (a temperature of log T)."""
    for node in data:
        if counts := counts_in_numbers(node, form):
            raise refusal(counts[0], f"goes into the numbers of {node.name}")


def _check_written(shared: RowFacts, data: set[fx.Node]) -> None:
    """Tensors into which values of tokens are written later must start out harmless, apart from other such writes."""
    others = {value: kept for value, all_ in shared.writers.items() if (kept := [node for node in all_ if node not in data])}
    before_tokens = RowFacts(shared.form, shared.values, shared.positions, others)
    for writer in sorted(data):
        for start in written_values(writer):
            made_of_none = start.op != "placeholder" and not any(source in data for source in read_inputs(start))
            if made_of_none and name_of(start) not in UNDEFINED and not writes_in_place(start) and _counts_tokens((start,), shared.form):
                if not RowReplacement(start, writer, before_tokens).is_harmless():
                    raise refusal(start, "is written over in part by values of tokens")


def picks_rows(user: fx.Node, value: fx.Node, form: CallForm, seen: set[fx.Node] | None = None) -> bool:
    """Whether `value`, through `user`, is only ever used to pick rows of token-sized tensors."""
    seen = set() if seen is None else seen
    if user in seen:
        return True
    seen.add(user)
    if user.op == "output" or value_of(value).dtype not in (torch.int64, torch.int32):
        return False
    indexed = indexed_tensor(user, value)
    if indexed is not None:
        return token_dims(indexed, form.num_tokens) > 0
    if writes_in_place(user):  # inverse[permutation] = arange(rows)
        targets = [target for target in written_values(user) if target is not value]
        return bool(targets) and all(picks_rows(other, t, form, seen) for t in targets for other in t.users if other is not user)
    made = value_of(user)
    if not isinstance(made, Tensor) or made.dtype not in (torch.int64, torch.int32) or not user.users:
        return False
    return all(picks_rows(other, user, form, seen) for other in user.users)
