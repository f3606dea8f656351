"""Attention whose weights do not come from a softmax, such as `exp(x - max) / sum`: they are the softmax of their own logarithm.

Before: e = exp(scores - max); out = (e / e.sum(-1, keepdim=True)) @ v; or (e @ v) / e.sum(-1, keepdim=True)
After:  weights = e / e.sum(-1, keepdim=True); out = weights @ v; and, for the proof alone, softmax([log(weights), log(1 - their sum)])
The first columns of that softmax are the weights, if the weights' rows add up to 1, or to less where there is a sink. Whether they do, and
how the logarithm depends on q.k, is not matched: `score_function` proves it on values.
Leaves alone: products of tokens against tokens that are not multiplied with values, or only after a softmax.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from paged_attn.passes.find.products import Product, product_of, score_products
from paged_attn.passes.find.spellings.score_layout import relabel
from paged_attn.passes.fx.graph_tools import call_with_value, op_name, shape_of, token_dims, value_of
from paged_attn.passes.fx.memory import bases_of, is_written
from paged_attn.passes.fx.slicing import ancestors

_SCALED = {"div", "truediv", "true_divide", "divide", "mul", "multiply"}
NOISE = 32  # roundings; smaller remainders count as zero


def log_weights(weights: Tensor) -> Tensor:
    """[.., T, T + 1]: scores whose softmax is `weights` [.., T, T]; the last column, a sink, is the logarithm of 1 - their sum."""
    rest = 1 - weights.double().sum(-1, keepdim=True)
    rest = rest * (rest > NOISE * torch.finfo(weights.dtype).eps)
    return torch.cat([weights, rest.to(weights.dtype)], -1).log()


def softmaxes_of_weights(graph: fx.Graph, softmaxes: set[fx.Node], num_tokens: Any) -> dict[fx.Node, Product]:
    """Adds a softmax to the graph for each product of values with weights that no softmax makes; returns softmax -> that product.

    Args:
        softmaxes: the graph's own softmaxes over tokens against tokens.
    """
    found: dict[fx.Node, Product] = {}
    for product in _weighted(graph, softmaxes, num_tokens):
        product = _divided_before(_in_layout(product, num_tokens), num_tokens)
        with graph.inserting_before(product.node):
            scores = call_with_value(graph, log_weights, product.left)
            found[call_with_value(graph, F.softmax, scores, -1)] = product
    return found


def _weighted(graph: fx.Graph, softmaxes: set[fx.Node], num_tokens: Any) -> list[Product]:
    """Products of values with tensors that are made of q.k without a softmax."""
    bare, behind = set[fx.Node](), set(softmaxes)
    found = []
    for node in graph.nodes:
        product = product_of(node)
        if product is not None and product.left in bare - behind and token_dims(product.right, num_tokens) == 1:
            found.append(product)
        if node in behind or token_dims(node, num_tokens) < 2 or not value_of(node).is_floating_point():
            continue
        if product is not None and all(token_dims(n, num_tokens) == 1 for n in (product.left, product.right)):
            bare.add(node)
        sources = set(node.all_input_nodes)
        if sources & behind:
            behind.add(node)
        elif sources & bare:
            bare.add(node)
    return found


def _in_layout(product: Product, num_tokens: Any) -> Product:
    """The product with queries and keys as the last two dims of its weights, and of the products that these are made of."""
    labels = product.lead + product.row + product.inner
    if product.left_labels == labels:
        return product
    for scores in score_products(product.left, num_tokens):
        relabel(scores, scores.left_labels, scores.labels)
    return relabel(product, labels, product.layout)


def _divided_before(product: Product, num_tokens: Any) -> Product:
    """(weights @ v) / sum as (weights / sum) @ v."""
    users = list(product.node.users)
    if len(users) != 1 or op_name(users[0]) not in _SCALED or len(users[0].args) != 2 or users[0].args[0] is not product.node:
        return product
    if users[0].kwargs or is_written(bases_of([product.left, product.right, product.node]), product.node, users[0].next):
        return product
    (user,), by = users, users[0].args[1]
    rows = shape_of(product.left)[:-1]
    if product.layout != product.labels:
        return product
    if not isinstance(by, fx.Node) or token_dims(by, num_tokens) != 1 or shape_of(by)[-1:] != (1,) or shape_of(by)[:-1] != rows:
        return product
    if {scores.node for scores in score_products(product.left, num_tokens)}.isdisjoint(ancestors(by, user)):
        return product  # a gate
    graph = user.graph
    with graph.inserting_before(user):
        left = call_with_value(graph, user.target, product.left, by)
        args = fx.map_arg(product.node.args, lambda node: left if node is product.left else node)
        node = call_with_value(graph, product.node.target, *args, **product.node.kwargs)
    node.meta["original_name"] = user.name
    user.replace_all_uses_with(node)
    graph.erase_node(user)
    graph.erase_node(product.node)
    divided = product_of(node)
    assert divided is not None
    return divided
