"""Which values of a graph hold data of the batch's tokens, which are made only from the number of tokens, constants and weights, and where
rows of tokens are looked up.

`torch.ones_like(ids)`, `x.new_zeros(...)` and sizes read only the shape of a tensor, so they hold no data of tokens.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from paged_attn.attn_ops.ops.positions import BATCH_POSITIONS
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import depends_on, name_of, symbol, value_of
from paged_attn.passes.fx.memory import written_values

aten = torch.ops.aten
_SHAPE_OF_FIRST = {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "size",
                   "sym_size", "dim", "numel", "stride", "rand_like", "randn_like", "randint_like"}  # fmt: skip
_SHAPE_OF_SECOND = {"expand_as", "view_as", "reshape_as", "type_as", "to"}
_INDEXED_BY = {"index_select": 2, "gather": 2, "index_add_": 2, "index_copy_": 2, "scatter_": 2, "scatter_add_": 2, "embedding": 0,
               "index_add": 2, "scatter": 2, "scatter_add": 2}  # fmt: skip
_ARITHMETIC = {"add", "sub", "mul", "div", "truediv", "pow", "floordiv", "floor_divide", "true_divide", "remainder", "mod", "rsub", "iadd",
               "isub", "imul", "itruediv", "add_", "sub_", "mul_", "div_", "pow_", "maximum", "minimum", "clamp"}  # fmt: skip
UNDEFINED = {"empty", "empty_like", "new_empty", "empty_strided"}  # uninitialized until written


def read_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs whose contents matter, not only their shape, dtype or device."""
    name = name_of(node)
    reads_attribute = node.target is getattr and node.args[1] in ("shape", "device", "dtype")
    skipped = 0 if name in _SHAPE_OF_FIRST or reads_attribute else None
    if name in _SHAPE_OF_SECOND and len(node.args) > 1 and isinstance(value_of(node.args[1]), Tensor):
        skipped = 1
    others = [argument for position, argument in enumerate(node.args) if position != skipped]  # x.view_as(x) reads x
    found: list[fx.Node] = []
    fx.map_arg((others, node.kwargs), found.append)
    return list(dict.fromkeys(found))


def token_data(graph: fx.Graph, form: CallForm, positions: bool = True) -> set[fx.Node]:
    """Every node that holds data of the tokens (ids, attention outputs, positions unless excluded, and all values made from them)."""
    others = ("owned", "tokens", "num_logits", *(() if positions else ("position_ids",)))
    found = {node for node, role in form.roles.items() if role not in others}
    while True:
        before = len(found)
        for node in graph.nodes:
            if node.target is BATCH_POSITIONS or any(source in found for source in read_inputs(node)):
                found |= {node} | written_values(node)
        if len(found) == before:
            return found


def is_count(value: Any, form: CallForm) -> bool:
    """Whether a number depends on T."""
    return isinstance(value, (torch.SymInt, torch.SymFloat)) and form.num_tokens in value.node.expr.free_symbols


def counts_in_numbers(node: fx.Node, form: CallForm) -> list[fx.Node]:
    """The inputs of a floating-point arithmetic node that are numbers made from T."""
    value = value_of(node)
    if name_of(node) not in _ARITHMETIC or not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        return []
    return [other for other in node.all_input_nodes if is_count(value_of(other), form)]


def indexed_tensor(node: fx.Node, index: fx.Node) -> fx.Node | None:
    """The tensor that `node` indexes with `index`; None if `index` is not used as an index."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.target is operator.getitem or name in ("__getitem__", "__setitem__", "setitem"):
        return _node(node.args[0]) if node.args[0] is not index and index in _flat(node.args[1]) else None
    position = _INDEXED_BY.get(str(name))
    if position is None or len(node.args) <= position or node.args[position] is not index:
        return None
    return _node(node.args[1] if name == "embedding" else node.args[0])


class Lookup(NamedTuple):
    """node = rows[.., at, ..], with integer indices `at` [.., T, ..] along `axis` of `rows`."""

    node: fx.Node
    rows: fx.Node
    axis: int
    at: fx.Node


def lookup_of(node: fx.Node) -> Lookup | None:
    """The lookup of a node that indexes one dimension with one integer tensor; None for any other node."""
    if node.op not in ("call_function", "call_method") or node.kwargs:
        return None
    if node.target is F.embedding and len(node.args) == 2:
        index, rows = node.args
        return _lookup(node, rows, 0, index)
    if name_of(node) == "index_select" and len(node.args) == 3:
        rows, axis, index = node.args
        return _lookup(node, rows, axis, index)
    if node.target in (operator.getitem, aten.index.Tensor) or name_of(node) == "__getitem__":
        rows, key = node.args
        parts = key if isinstance(key, (tuple, list)) else (key,)
        whole = None if node.target is aten.index.Tensor else slice(None)
        axes = [axis for axis, part in enumerate(parts) if isinstance(part, fx.Node) and isinstance(value_of(part), Tensor)]
        if len(axes) == 1 and all(part == whole for axis, part in enumerate(parts) if axis != axes[0]):
            return _lookup(node, rows, axes[0], parts[axes[0]])
    return None


def _lookup(node: fx.Node, rows: Any, axis: Any, index: Any) -> Lookup | None:
    if not (isinstance(rows, fx.Node) and isinstance(index, fx.Node) and isinstance(axis, int)):
        return None
    table, numbers = value_of(rows), value_of(index)
    if not isinstance(table, Tensor) or not isinstance(numbers, Tensor) or numbers.dtype not in (torch.int64, torch.int32):
        return None
    return Lookup(node, rows, axis % table.dim(), index) if table.dim() else None


def _node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None


def _flat(value: Any) -> list[Any]:
    return [inner for part in value for inner in _flat(part)] if isinstance(value, (tuple, list)) else [value]


def token_axis(node: fx.Node, form: CallForm) -> int | None:
    """The one dimension of a node's tensor that depends on T, if it is T itself."""
    value = value_of(node)
    axes = [axis for axis, size in enumerate(value.shape) if depends_on(size, form.num_tokens)] if isinstance(value, Tensor) else []
    return axes[0] if len(axes) == 1 and symbol(value.shape[axes[0]]) == form.num_tokens else None
