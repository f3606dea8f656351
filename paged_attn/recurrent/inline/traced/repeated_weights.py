"""Products with a weight that was repeated for each row of a batch, as a batched product with a module's weights is: without the copies.

A step's rows are few, but a program runs all tokens of a prompt as rows, and would keep a copy of the weight for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_REGROUPED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default)


def without_repeated_weights(graph: fx.Graph, rows: int) -> None:
    """`bmm(W expanded over rows, x)` becomes `bmm(W, the x of all rows)`, on either side.

    Args:
        rows: the traced number of rows; the graph has numbers in the place of multiples of it.
    """
    for node in list(graph.find_nodes(op="call_function", target=aten.bmm.default)):
        for side in (0, 1):
            weight = _repeated(node.args[side], rows)
            if weight is not None:
                _replace(graph, node, weight, node.args[1 - side], side == 0, rows)
                break
    graph.eliminate_dead_code()


def _repeated(node: Any, rows: int) -> fx.Node | None:
    """The weight [heads, 1, M, K] that a node [heads * rows, M, K] repeats."""
    count, *matrix = node.meta["val"].shape
    while node.target in _REGROUPED:
        node = node.args[0]
    if node.target is not aten.expand.default:
        return None
    weight: fx.Node = node.args[0]
    shape, before = tuple(node.meta["val"].shape), tuple(weight.meta["val"].shape)
    fits = len(before) == len(shape) == 4 and before[1] == 1 and before[0] == shape[0]
    return weight if fits and shape[1] == rows and list(shape[2:]) == matrix and shape[0] * rows == count else None


def _replace(graph: fx.Graph, node: fx.Node, weight: fx.Node, other: Any, left: bool, rows: int) -> None:
    heads, _, m, k = weight.meta["val"].shape
    _, first, last = other.meta["val"].shape

    def call(target: Any, given: fx.Node, *args: Any) -> fx.Node:
        made = graph.call_function(target, (given, *args))
        others = [each.meta["val"] if isinstance(each, fx.Node) else each for each in args]
        made.meta["val"] = target(given.meta["val"], *others)
        return made

    with graph.inserting_before(node):
        matrix = call(aten.reshape.default, weight, [heads, m, k])
        x = call(aten.reshape.default, other, [heads, rows, first, last])
        if left:  # [heads, m, k] @ [heads, k, rows * last]
            x = call(aten.reshape.default, call(aten.permute.default, x, [0, 2, 1, 3]), [heads, first, rows * last])
            product = call(aten.reshape.default, call(aten.bmm.default, matrix, x), [heads, m, rows, last])
            product = call(aten.permute.default, product, [0, 2, 1, 3])
        else:  # [heads, rows * first, m] @ [heads, m, k]
            product = call(aten.bmm.default, call(aten.reshape.default, x, [heads, rows * first, last]), matrix)
        result = call(aten.reshape.default, product, list(node.meta["val"].shape))
    node.replace_all_uses_with(result)
    graph.erase_node(node)
