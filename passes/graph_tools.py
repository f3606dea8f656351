"""Small tools on FX graphs that several passes share."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import SymInt, fx

_INPLACE_FUNCTIONS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.iand, operator.ior, operator.ixor, operator.ipow, operator.imatmul,
}  # fmt: skip
_SIDE_EFFECTS = {"manual_seed", "_log_api_usage_once", "_assert", "_assert_async", "_set_grad_enabled"}


def writes_in_place(node: fx.Node) -> bool:
    """True for in-place methods and functions, and for ops whose schema mutates an argument."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if target in _INPLACE_FUNCTIONS or node.kwargs.get("out") is not None:
        return True
    name = getattr(target, "__name__", "")
    return name.endswith("_") and not name.endswith("__") and getattr(target, "__module__", "") != "_operator"


def remove_dead_code(graph: fx.Graph) -> None:
    """Dead-code elimination that keeps every in-place operation on something that lives.

    `graph.eliminate_dead_code()` alone drops unused in-place methods, which silently changed logits (DESIGN.md, traps). An
    in-place operation whose own target is dead goes too, so that the mask of a replaced attention leaves no residue.
    """
    live: set[fx.Node] = {node for node in graph.nodes if node.op in ("output", "placeholder") or _has_effect(node)}
    pending = list(live)
    while pending:
        node = pending.pop()
        grown = [*node.all_input_nodes, *(user for user in node.users if writes_in_place(user) and writes_to(user, node))]
        for other in grown:
            if other not in live:
                live.add(other)
                pending.append(other)
    for node in reversed(list(graph.nodes)):
        if node not in live:
            graph.erase_node(node)


def writes_to(node: fx.Node, target: fx.Node) -> bool:
    """Whether an in-place `node` mutates `target`, or a value that it reads `target` through: any of its first two arguments or `out`."""
    if isinstance(node.target, torch._ops.OpOverload):
        mutable = {a.name: i for i, a in enumerate(node.target._schema.arguments) if a.alias_info and a.alias_info.is_write}
        written = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for name, i in mutable.items()]
        return target in written
    return bool(node.args and node.args[0] is target) or node.kwargs.get("out") is target


def _has_effect(node: fx.Node) -> bool:
    if node.op == "call_function" and getattr(node.target, "__name__", "") in _SIDE_EFFECTS:
        return getattr(node.target, "__name__", "") != "_log_api_usage_once"
    # A view may be written through: an in-place write to something whose base we can not name must stay.
    return writes_in_place(node) and not isinstance(node.target, torch._ops.OpOverload) and _writes_through_view(node)


def _writes_through_view(node: fx.Node) -> bool:
    return bool(node.args) and isinstance(node.args[0], fx.Node) and node.args[0].op in ("placeholder", "get_attr")


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A GraphModule with its own graph and the same parameters, so that the original stays runnable."""
    return fx.GraphModule(gm, copy.deepcopy(gm.graph))


def source_name(placeholder: fx.Node) -> str:
    """Dynamo's name of a graph input: `L['self']._modules['lm_head']._parameters['weight']`, `L['input_ids']`."""
    source = getattr(placeholder, "_dynamo_source", None) or getattr(placeholder.meta.get("grapharg"), "source", None)
    if source is None:
        return str(placeholder.target)
    name = source.name
    return name() if callable(name) else str(name)


def value_of(node: Any) -> Any:
    """What Dynamo saw at this node: a fake tensor, a SymInt, or the constant itself."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else node


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    return tuple(value_of(node).shape)


def symbol(size: Any) -> Any:
    """The sympy expression of a symbolic size, or the int itself; comparing these installs no guard."""
    return size.node.expr if isinstance(size, SymInt) else size


def depends_on(size: Any, token_symbol: Any) -> bool:
    expression = symbol(size)
    return not isinstance(expression, int) and token_symbol in getattr(expression, "free_symbols", ())


def in_graph_order(graph: fx.Graph, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    wanted = set(nodes)
    return [node for node in graph.nodes if node in wanted]
