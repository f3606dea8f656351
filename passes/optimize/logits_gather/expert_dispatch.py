"""Rows that are sorted by expert, computed group by group, and put back: each goes through the experts that it chose, alone.

ids [k T] = chosen.reshape(-1); keys, indices = sort(ids); x' = x[indices // k]; offsets = cumsum(histc(keys));
y' = grouped_mm(x', W, offsets); back = empty_like(indices); back[indices] = arange(k T); y = y'[back].view(T, k, H).sum(1)
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket

from paged_attn.passes.fx.graph_tools import value_of, writes_in_place, written_values
from paged_attn.passes.fx.row_layout import Rows, times
from paged_attn.passes.fx.token_data import name_of

_CASTS = {"float", "int", "long", "to"}
_SAME_NUMBERS = _CASTS | {"view", "reshape", "flatten", "contiguous", "squeeze", "unsqueeze"}


@dataclass(frozen=True)
class Part:
    """Something on the way, of the sorting `order` of k * T rows.

    what: "indices" (what sort gives), "rows" (indices // k), "counts" and "offsets" of the groups, "back" (the inverse of indices), "count"
        (0, 1, .., k T - 1; of no order) or "filled" (what fills "back").
    """

    what: str
    order: fx.Node | None
    k: int


def dispatch_layout(node: fx.Node, given: Mapping[fx.Node, Any], tokens: Any) -> Any:
    """The layout of one step of a dispatch to experts; None if it is none.

    Args:
        given: the layouts of all its operands that have rows.
    """
    rule = STEPS.get(name_of(node))
    return None if rule is None or not node.args else rule(node, given, tokens)


def _sort(node: fx.Node, given: Mapping[fx.Node, Any], tokens: Any) -> Any:
    layout = given.get(node.args[0])  # type: ignore[arg-type]
    value = value_of(node.args[0])
    if len(node.args) > 1 or set(node.kwargs) - {"stable"} or not isinstance(layout, Rows) or layout.order is not None:
        return None  # from the lowest to the highest it must be, for counts to say where groups end
    if layout.before != 1 or value.dim() != 1 or value.is_floating_point():
        return None
    return Rows(0, 1, layout.after, node), Part("indices", node, layout.after)


def _floordiv(node: fx.Node, given: Mapping[fx.Node, Any], tokens: Any) -> Any:
    part = given.get(node.args[0])  # type: ignore[arg-type]
    is_row = isinstance(part, Part) and part.what == "indices" and node.args[1] == part.k and type(node.args[1]) is int
    return Part("rows", part.order, part.k) if is_row and isinstance(part, Part) else None


def _getitem(node: fx.Node, given: Mapping[fx.Node, Any], tokens: Any) -> Any:
    source, index = node.args
    if node.target is not operator.getitem or not isinstance(index, fx.Node) or not isinstance(source, fx.Node):
        return None
    rows, part = given.get(source), given.get(index)
    if source not in given and isinstance(part, Rows):
        return _looked_up(node, index, part)
    if not isinstance(rows, Rows) or not isinstance(part, Part) or rows.axis != 0 or rows.before != 1:
        return None
    sorted_rows = Rows(0, 1, part.k, part.order)
    if (part.what, rows.order, rows.after) in (("rows", None, 1), ("indices", None, part.k)):
        return sorted_rows
    return Rows(0, 1, part.k) if part.what == "back" and rows == sorted_rows else None


def _looked_up(node: fx.Node, index: fx.Node, layout: Rows) -> Rows | None:
    """Rows of a table, by numbers of which each belongs to a row."""
    value = value_of(index)
    return layout if isinstance(value_of(node.args[0]), Tensor) and value.dtype in (torch.int64, torch.int32) else None


def _histc(node: fx.Node, given: Mapping[fx.Node, Any], tokens: Any) -> Any:
    """How many rows each of as many experts as were chosen among has."""
    keys = _followed(node.args[0], _CASTS)
    order, layout = _taken_from(keys[-1], "sort", 0), given.get(node.args[0])  # type: ignore[arg-type]
    if order is None or not isinstance(layout, Rows) or layout.order is not order:
        return None
    ids = _followed(order.args[0], _SAME_NUMBERS)
    chosen, bins = _taken_from(ids[-1], "topk", 1), node.kwargs.get("bins")
    counts_all = isinstance(bins, int) and len(node.args) == 1 and dict(node.kwargs) == {"bins": bins, "min": 0, "max": bins - 1}
    if chosen is None or not counts_all or _size_along(chosen) != bins or _are_written({*keys, *ids}):
        return None
    return Part("counts", order, layout.after)


def _followed(node: Any, names: set[str]) -> list[Any]:
    """A node, and what it was made from by these operations, which take nothing else that is computed."""
    nodes = [node]
    while isinstance(nodes[-1], fx.Node) and name_of(nodes[-1]) in names:
        nodes.append(nodes[-1].args[0])
    return nodes


def _taken_from(node: Any, name: str, result_index: int) -> fx.Node | None:
    """The operation of that name whose result at `result_index` a node is."""
    if not isinstance(node, fx.Node) or name_of(node) != "getitem" or node.args[1] != result_index:
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) and name_of(source) == name else None


def _size_along(topk: fx.Node) -> int | None:
    """Among how many it chose: what it gives is in [0, n)."""
    dim = topk.kwargs.get("dim", topk.args[2] if len(topk.args) > 2 else -1)
    size = value_of(topk.args[0]).shape[dim] if isinstance(dim, int) else None
    return size if isinstance(size, int) else None


def _are_written(nodes: set[fx.Node]) -> bool:
    """Whether one of these is changed in place, at any time."""
    same = {
        user for node in nodes if name_of(node) == "getitem" for user in node.all_input_nodes[0].users if user.args[1:] == node.args[1:]
    }
    graph = next(iter(nodes)).graph
    return any(written_values(node) & (nodes | same) for node in graph.nodes if writes_in_place(node))


def _cumsum(node: fx.Node, given: Mapping[fx.Node, Any], tokens: Any) -> Any:
    part = given.get(node.args[0])  # type: ignore[arg-type]
    return Part("offsets", part.order, part.k) if isinstance(part, Part) and part.what == "counts" else None


def _grouped_mm(node: fx.Node, given: Mapping[fx.Node, Any], tokens: Any) -> Any:
    source, weight, offsets = node.args[0], node.args[1], node.args[2] if len(node.args) > 2 else node.kwargs.get("offs")
    if set(node.kwargs) - {"offs"} or weight in given or not _is_grouped_mm(node.target):
        return None
    layout, part = given.get(source), given.get(offsets)  # type: ignore[arg-type]
    if not isinstance(layout, Rows) or not isinstance(part, Part) or part.what != "offsets":
        return None
    shapes = value_of(weight).dim() == 3 and value_of(offsets).shape[0] == value_of(weight).shape[0]
    return layout if layout == Rows(0, 1, part.k, part.order) and shapes else None


def _is_grouped_mm(target: Any) -> bool:
    if isinstance(target, OpOverload | OpOverloadPacket):
        return str(target).removesuffix(".default") in ("transformers.grouped_mm_fallback", "aten._grouped_mm")
    return target in (getattr(torch, "_grouped_mm", None), getattr(torch.nn.functional, "grouped_mm", None))


def _empty_like(node: fx.Node, given: Mapping[fx.Node, Any], tokens: Any) -> Any:
    """Becomes the inverse before anybody reads it."""
    part, writers = given.get(node.args[0]), [user for user in node.users if writes_in_place(user)]  # type: ignore[arg-type]
    if not isinstance(part, Part) or part.what != "indices" or len(writers) != 1 or min(node.users) is not writers[0]:
        return None
    fills = writers[0].target is operator.setitem and writers[0].args[:2] == (node, node.args[0])
    read = all(user.target is operator.getitem for user in node.users if user not in writers)
    return Part("back", part.order, part.k) if fills and read else None


def _arange(node: fx.Node, given: Mapping[fx.Node, Any], tokens: Any) -> Any:
    count = times(value_of(node.args[0]), tokens)
    plain = len(node.args) == 1 and not set(node.kwargs) - {"device"}
    return Part("count", None, count) if plain and count and all(user.target is operator.setitem for user in node.users) else None


def _setitem(node: fx.Node, given: Mapping[fx.Node, Any], tokens: Any) -> Any:
    back, indices, count = (given.get(each) if isinstance(each, fx.Node) else None for each in node.args)
    if not isinstance(back, Part) or back.what != "back" or not isinstance(count, Part) or not isinstance(indices, Part):
        return None
    fits = indices == Part("indices", back.order, back.k) and count == Part("count", None, back.k)
    return Part("filled", back.order, back.k) if fits else None


STEPS = {
    "sort": _sort, "floordiv": _floordiv, "floor_divide": _floordiv, "getitem": _getitem, "histc": _histc, "cumsum": _cumsum,
    "_grouped_mm": _grouped_mm, "grouped_mm": _grouped_mm, "grouped_mm_fallback": _grouped_mm, "empty_like": _empty_like,
    "arange": _arange, "setitem": _setitem,
}  # fmt: skip
