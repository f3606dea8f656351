"""Merges linears of one input (q, k and v; gate and up) into one linear on a merged weight; the old results become slices of its output."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import call_of_value, op_name, sizes_of, take_place, value_of
from paged_attn.passes.fx.memory import bases_of, writes_in_place, written_values
from paged_attn.passes.optimize.linears.mergeable_weights import Memory, is_ordinary_parameter, lie_in_a_row
from paged_attn.passes.optimize.linears.sites import Linear, linear_of
from paged_attn.passes.optimize.linears.sliced_values import SlicedValues


class Merge(NamedTuple):
    """The graph's input `inputs[0]` now takes the tensors of all `inputs` concatenated along dim 0; the others have no user.

    `rows` are their sizes in that dim; after them come `spare` further rows.
    """

    inputs: tuple[int, ...]
    rows: tuple[int, ...]
    spare: int = 0


def merge_linears(graph: fx.Graph, form: CallForm, values: Values, model: nn.Module | None = None) -> tuple[Merge, ...]:
    """Merges linears in place; linears without a partner do not change.

    Linears are merged only between two ops that write (our attention, ...), so no output is kept in memory across one.
    Args:
        values: parameters among them that cannot be moved are left alone.
        model: its parameters and buffers are searched for others that share the same memory.

    Returns:
        What the caller must concatenate before the graph can run; see `Merge`.
    """
    memory = Memory([*values.values(), *(() if model is None else (*model.parameters(), *model.buffers()))])
    index = {node: i for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    merges: list[Merge] = []
    slices = SlicedValues()
    for group in _groups(graph, form, values, slices):
        members = _movable(group, values, memory)
        if len(members) > 1:
            merges += _merge(members, index, slices)
    return tuple(merges)


def _groups(graph: fx.Graph, form: CallForm, values: Values, slices: SlicedValues) -> list[list[Linear]]:
    """Linears with the same input, with or without bias; the input does not change between the first and the last."""
    groups: list[list[Linear]] = []
    open_groups: dict[tuple[fx.Node, bool], list[Linear]] = {}
    for node in graph.nodes:
        if writes_in_place(node):
            barrier, written = isinstance(node.target, torch._ops.OpOverload), written_values(node)
            open_groups = {} if barrier else {k: g for k, g in open_groups.items() if not written & bases_of([g[0].input])}
        linear = _mergeable(node, form, values, slices)
        if linear is not None:
            key = (linear.input, linear.bias is None)
            if key not in open_groups:
                groups.append(open_groups.setdefault(key, []))
            open_groups[key].append(linear)
    return groups


def _mergeable(node: fx.Node, form: CallForm, values: Values, slices: SlicedValues) -> Linear | None:
    linear = linear_of(node, form)
    if linear is None or not slices.takes_slices(node):
        return None
    linear = linear._replace(input=_as_given(linear.input))
    return linear if all(len(owned.users) == 1 and is_ordinary_parameter(values[owned]) for owned in linear.owned) else None


def _as_given(node: fx.Node) -> fx.Node:
    """The tensor itself behind reshapes that leave it as it is, as a router's of its rows may."""
    while op_name(node) in ("view", "reshape") and sizes_of(node) == sizes_of(node.args[0]):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _movable(group: list[Linear], values: Values, memory: Memory) -> list[Linear]:
    """The whole group if its memory is already merged; else those linears whose tensors may be moved."""
    columns = zip(*(linear.owned for linear in group), strict=True)
    if len(group) > 1 and all(lie_in_a_row([values[owned] for owned in column]) for column in columns):
        return group
    return [linear for linear in group if all(memory.is_own(values[owned]) for owned in linear.owned)]


def _merge(members: list[Linear], index: dict[fx.Node, int], sliced: SlicedValues) -> list[Merge]:
    first, graph = members[0], members[0].node.graph
    sizes = tuple(int(value_of(m.weight).shape[0]) for m in members)
    merges = []
    for column in zip(*(m.owned for m in members), strict=True):
        fake = value_of(column[0])
        column[0].meta["example_value"] = fake.new_empty((sum(sizes), *fake.shape[1:]))
        merges.append(Merge(tuple(index[owned] for owned in column), sizes))
    product, *parts = sliced.of_product(value_of(first.input), [value_of(owned) for owned in first.owned], sizes)
    with graph.inserting_before(first.node):
        merged = call_of_value(graph, product, F.linear, first.input, *first.owned)
        starts = accumulate(sizes, initial=0)
        slices = [call_of_value(graph, part, torch.narrow, merged, -1, *span) for *span, part in zip(starts, sizes, parts, strict=False)]
    for member, part in zip(members, slices, strict=True):
        for view, value in sliced.of_views(member.node, value_of(part)).items():
            view.meta["example_value"] = value
        take_place(member.node, part)
    return merges
