"""Makes one product of scores that are a sum of two, as latent attention is written whose rotated part has a product of its own.

Before: scores = einsum("bshc,btc->bsht", q, latent) + einsum("bshr,btr->bsht", q_rotated, rotated); each may have a number as a factor
After:  scores = cat((q, q_rotated), -1) @ cat((latent, rotated), -1)^T, in the layout of the sum
Leaves alone: products that something else reads, and factors that are tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from paged_attn.passes.find.products import Product, product_of
from paged_attn.passes.fx.graph_tools import call_with_value, op_name, sizes_of, take_place, token_dims, value_of
from paged_attn.passes.fx.memory import is_written, move_before

_Term = tuple[Product, float]
_BY_NUMBER = {"mul": 1, "imul": 1, "div": -1, "truediv": -1, "itruediv": -1}


def join_sums(graph: fx.Graph, num_tokens: Any) -> None:
    """Rewrites every such sum in place, the innermost first."""
    for node in list(graph.nodes):
        if op_name(node) not in ("add", "iadd") or node.kwargs or len(node.args) != 2 or token_dims(node, num_tokens) != 2:
            continue
        terms = [_term(argument, num_tokens) for argument in node.args]
        if None not in terms:
            _join(node, [term for term in terms if term is not None])


def _term(node: Any, num_tokens: Any) -> _Term | None:
    """The product of tokens with tokens that a node is, and the number it is multiplied by; nothing but the sum reads it, so that it does
    not matter whether something is written in place."""
    factor = 1.0
    while isinstance(node, fx.Node) and len(node.users) == 1 and token_dims(node, num_tokens) == 2:
        product = product_of(node)
        if product is not None:
            return (product, factor) if all(token_dims(n, num_tokens) == 1 for n in (product.left, product.right)) else None
        name, numbers = op_name(node), [each for each in node.args if isinstance(each, (int, float))]
        if name not in _BY_NUMBER or node.kwargs or len(node.args) != 2 or len(numbers) != 1:
            return None
        if _BY_NUMBER[name] == 1:
            factor *= numbers[0]
        elif node.args[1] is numbers[0] and numbers[0] != 0:
            factor /= numbers[0]
        else:
            return None
        (node,) = node.all_input_nodes
    return None


def _join(node: fx.Node, terms: list[_Term]) -> None:
    first, second = (product for product, _ in terms)
    shapes = {sizes_of(product.node) for product in (first, second)} | {sizes_of(node)}
    factors = {each for product in (first, second) for each in (product.left, product.right)}
    if len({value_of(each).dtype for each in (node, *factors)}) != 1:
        return
    try:
        sizes = {(*product.lead_sizes, *product.to_canonical) for product in (first, second)}
    except ValueError:
        return
    if len(shapes) != 1 or len(sizes) != 1 or is_written(factors, min(first.node, second.node), node) or not move_before(node, factors):
        return
    graph, queries, keys = node.graph, [], []
    for product, factor in terms:
        query = _with_lead_dims(product, product.emit_factor("left", product.row, product.inner, node), node)
        keys.append(_with_lead_dims(product, product.emit_factor("right", product.column, product.inner, node), node))
        with graph.inserting_before(node):
            queries.append(query if factor == 1 else call_with_value(graph, torch.mul, query, factor))
    with graph.inserting_before(node):
        query, key = (call_with_value(graph, torch.cat, tuple(each), -1) for each in (queries, keys))
        result = scores = call_with_value(graph, torch.matmul, query, call_with_value(graph, "transpose", key, -2, -1))
        if first.layout != first.labels:
            result = call_with_value(graph, "permute", scores, [first.labels.index(label) for label in first.layout])
    take_place(node, result, scores)


def _with_lead_dims(product: Product, factor: fx.Node, before: fx.Node) -> fx.Node:
    """[1, heads, rows, columns] with the product's own dims in front; a reshape of the scores would need T as a number."""
    sizes = product.lead_sizes
    if len(sizes) == 2 and sizes[0] == 1:
        return factor
    with factor.graph.inserting_before(before):
        without = call_with_value(factor.graph, "select", factor, 0, 0)
        return (
            call_with_value(factor.graph, "unflatten", without, 0, sizes)
            if sizes
            else call_with_value(factor.graph, "select", without, 0, 0)
        )
