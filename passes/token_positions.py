"""Positions that a model counts along the row become the batch's own positions.

Before: p = torch.arange(T); ... float(p) ... or table[p]      (Llama 4's temperature; learned positions)
After:  p = position_ids[0]
In a single sequence from position 0 the two are equal; in a ragged row only position_ids restart at each request. An arange
that only picks rows of a token-sized tensor (mixture-of-experts dispatch) is a row number and stays. Runs after attention was
replaced, so that the aranges of masks are gone. Declines: an arange of tokens that starts or steps otherwise than 0, 1, ...
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.attention_site import module_path
from paged_attn.passes.call_form import CallForm
from paged_attn.passes.graph_tools import depends_on, value_of, writes_in_place

aten = torch.ops.aten
_INDEXED_BY = {"index_select": 2, "gather": 2, "index_add_": 2, "index_copy_": 2, "scatter_": 2, "scatter_add_": 2, "embedding": 0,
               "index_add": 2, "scatter": 2, "scatter_add": 2}  # fmt: skip


def use_batch_positions(graph: fx.Graph, form: CallForm) -> int:
    """Rewrite in place; returns how many uses were redirected."""
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch.arange or not depends_on(value_of(node).shape[0], form.num_tokens):
            continue
        users = [user for user in node.users if _is_position(user, node, form, set())]
        if not users:
            continue
        _check_plain(node)
        assert form.positions is not None  # a paged call form has them
        with graph.inserting_after(node):
            positions = graph.call_function(aten.select.int, (form.positions, 0, 0))
        positions.meta["example_value"] = value_of(node)
        for user in users:
            user.replace_input_with(node, positions)
            count += 1
    return count


def _check_plain(node: fx.Node) -> None:
    if any(writes_in_place(user) for user in node.users):
        raise UnsupportedError(
            f"{module_path(node) or node.name} counts tokens along the row with torch.arange and changes the numbers in place"
        )
    plain = len(node.args) == 1 and not {"start", "step", "end"} & set(node.kwargs)
    zero_start = len(node.args) == 2 and node.args[0] == 0
    dtype = value_of(node).dtype
    if not (plain or zero_start) or dtype != torch.int64:
        raise UnsupportedError(
            f"{module_path(node) or node.name} counts tokens along the row with torch.arange{node.args} of {dtype}; "
            "only arange(T) of int64 is known as positions. A ragged batch would get wrong positions, so the model is refused."
        )


def _is_position(node: fx.Node, came_from: fx.Node, form: CallForm, seen: set[fx.Node]) -> bool:
    """Whether the number itself, not the row that it names, reaches a floating value or a table through `node`."""
    if node in seen:
        return False
    seen.add(node)
    indexed = _indexed_tensor(node, came_from)
    if indexed is not None:
        return not any(depends_on(size, form.num_tokens) for size in value_of(indexed).shape)
    value = value_of(node)
    if node.op == "output":
        return True
    if isinstance(value, Tensor) and value.dtype.is_floating_point:
        return True
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return False
    return any(_is_position(user, node, form, seen) for user in node.users)


def _indexed_tensor(node: fx.Node, index: fx.Node) -> fx.Node | None:
    """The tensor that `node` looks up with `index`, or None if it uses `index` as a number."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.target is operator.getitem or name in ("__getitem__", "__setitem__", "setitem"):
        return _node(node.args[0]) if node.args[0] is not index and index in _flat(node.args[1]) else None
    position = _INDEXED_BY.get(str(name))
    if position is None or len(node.args) <= position or node.args[position] is not index:
        return None
    return _node(node.args[1] if name == "embedding" else node.args[0])


def _node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None


def _flat(value: Any) -> list[Any]:
    return [inner for part in value for inner in _flat(part)] if isinstance(value, (tuple, list)) else [value]
