"""Cutting out the subgraph that makes a value, and evaluating it on concrete probes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.passes.fx.graph_tools import call, writers_of

MAX_NODES = 4000


def ancestors(node: fx.Node, user: fx.Node, stop: frozenset[fx.Node] = frozenset()) -> list[fx.Node]:
    """Every node that `node` is made from, itself included, in graph order, with the in-place writes to any of them before `user`.

    `user` is where the value is needed: a mask may be filled in place after it was made. Nodes in `stop` are included but not
    looked behind.
    """
    writers = writers_of(takewhile(lambda other: other is not user, node.graph.nodes))
    found, pending = {node}, [node]
    while pending:
        current = pending.pop()
        for other in (*([] if current in stop else current.all_input_nodes), *writers.get(current, ())):
            if other not in found:
                found.add(other)
                pending.append(other)
    return sorted(found)


def evaluate(
    nodes: list[fx.Node], given: Mapping[fx.Node, Any], result: fx.Node, constant: Callable[[fx.Node, Any], Any] | None = None
) -> Any:
    """Run `nodes` in order with `given` values for some of them; `constant` may replace a literal argument of a node.

    Raises:
        KeyError: a placeholder that is not in `given`.
    """
    return evaluate_all(nodes, given, constant)[result]


def evaluate_all(
    nodes: list[fx.Node], given: Mapping[fx.Node, Any], constant: Callable[[fx.Node, Any], Any] | None = None
) -> dict[fx.Node, Any]:
    """The same, with the values of all nodes."""
    written = writers_of(nodes)
    values = {n: v.clone() if n in written and isinstance(v, Tensor) else v for n, v in given.items()}  # the model's own stay as they are

    with torch.no_grad():
        for node in nodes:
            if node in values:
                continue
            args, kwargs = fx.map_arg(node.args, values.__getitem__), fx.map_arg(node.kwargs, values.__getitem__)
            if constant is not None:
                args = tuple(constant(node, a) for a in args)
                kwargs = {name: constant(node, a) for name, a in kwargs.items()}
            if node.op in ("call_function", "call_method"):
                values[node] = call(node, args, kwargs)
            elif node.op == "get_attr":
                values[node] = attribute_of(node)
            else:
                raise KeyError(node)
    return values


def attribute_of(node: fx.Node) -> Any:
    """What a get_attr node stands for."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)
