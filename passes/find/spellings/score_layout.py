"""Permutes scores of written-out attention whose last two dims are not queries and keys.

Before: scores = einsum("bshd,bthd->bsht", q, k); out = einsum("bsht,bthd->bshd", softmax(f(scores)), v)
After:  the same products as [b, h, s, t] with a permutation after the first and before the second, and the softmax between two
Leaves alone: scores that already have this layout, and products whose factors are not found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from paged_attn.passes.find.products import Product, product_of, score_products, weighted_sums
from paged_attn.passes.fx.graph_tools import argument_of, call_with_value, shape_of, symbol, take_place, token_dims


def token_axes(softmax: fx.Node, num_tokens: Any) -> tuple[int, int] | None:
    """The dims of queries and keys of a softmax over T keys (or T + 1, with a sink) for T queries; None for any other softmax."""
    shape, dim = shape_of(softmax), argument_of(softmax, 1, "dim")
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape) or token_dims(softmax, num_tokens) < 2:
        return None
    keys = dim % len(shape)
    queries = [axis for axis, size in enumerate(shape) if axis != keys and symbol(size) == num_tokens]
    return (queries[-1], keys) if queries else None


def bring_to_layout(softmax: fx.Node, num_tokens: Any) -> fx.Node:
    """Returns the softmax, or its replacement in the new layout."""
    axes, rank = token_axes(softmax, num_tokens), len(shape_of(softmax))
    assert axes is not None
    if axes == (rank - 2, rank - 1):
        return softmax
    scores = argument_of(softmax, 0, "input")
    products = score_products(scores, num_tokens)
    outputs = weighted_sums(softmax, num_tokens)
    if not products or not outputs:
        return softmax
    for product in products:
        relabel(product, product.left_labels, product.labels)
    for product in outputs:
        relabel(product, product.lead + product.row + product.inner, product.layout)
    order = [*(axis for axis in range(rank) if axis not in axes), *axes]
    given = {name: value for name, value in softmax.kwargs.items() if name not in ("input", "dim")}
    with softmax.graph.inserting_before(softmax):
        permuted = call_with_value(softmax.graph, "permute", argument_of(softmax, 0, "input"), order)
        new = call_with_value(softmax.graph, softmax.target, permuted, -1, *softmax.args[2:], **given)
        back = call_with_value(softmax.graph, "permute", new, [order.index(axis) for axis in range(len(order))])
        result = call_with_value(softmax.graph, "contiguous", back)  # as the softmax left it: what follows may be a `view`
    take_place(softmax, result, permuted, new, back)
    return new


def relabel(product: Product, left_labels: str, layout: str) -> Product:
    """Replaces a product by an einsum with these labels for its left factor and result. Its users still get the old layout."""
    graph, node, left = product.node.graph, product.node, product.left
    with graph.inserting_before(node):
        if left_labels != product.left_labels:
            left = call_with_value(graph, "permute", left, [product.left_labels.index(label) for label in left_labels])
        equation = f"{left_labels},{product.right_labels}->{layout}"
        new = back = result = call_with_value(graph, torch.einsum, equation, left, product.right)
        if layout != product.layout:
            back = call_with_value(graph, "permute", new, [layout.index(label) for label in product.layout])
            result = call_with_value(graph, "contiguous", back)
    keep_origin(node, result)
    take_place(node, result, new, back)
    relabelled = product_of(new)
    assert relabelled is not None
    return relabelled


def keep_origin(node: fx.Node, new: fx.Node) -> None:
    """Note on what takes a node's place what the node was called in the model's graph, and which finder it came from."""
    new.meta["original_name"] = node.meta.get("original_name", node.name)
    if "found_by" in node.meta:
        new.meta["found_by"] = node.meta["found_by"]
