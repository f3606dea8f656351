"""Splits the rows of products that have tokens and heads in one dim, as multi-query attention is often written, into two dims.

Before: scores = bmm(q [b, T * heads, d], k [b, d, T]).view(b, T, heads, T); out = bmm(softmax(f(scores)).view(b, T * heads, T), v)
After:  scores = einsum("axyD,aDK->axyK", q.unflatten(-2, (-1, heads)), k).flatten(-3, -2).view(b, T, heads, T), and the same for `out`
Leaves alone: products whose rows are in no such view before or after them. That view shows which of the two dims comes first; the
        numbers are the same either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from paged_attn.passes.find.products import Product, product_of
from paged_attn.passes.find.spellings.score_layout import keep_origin
from paged_attn.passes.fx.graph_tools import call_with_value, reached, shape_of, sizes_of, symbol, take_place, token_dims


def split_rows(graph: fx.Graph, num_tokens: Any) -> None:
    for node in list(graph.nodes):
        product = product_of(node)
        if product is None or product.left_labels[-2:] != product.row + product.inner or product.layout != product.labels:
            continue
        heads = _factor(shape_of(product.left)[-2], num_tokens)
        if heads is None:
            continue
        # Scores are split behind their product, weights in front of theirs.
        of_scores = token_dims(product.left, num_tokens) == 1
        parts = _parts(node, True, heads, num_tokens) if of_scores else _parts(product.left, False, heads, num_tokens)
        if parts is not None:
            _split(product, parts)


def _factor(size: Any, num_tokens: Any) -> int | None:
    """How often T a size is, if that is a number above 1."""
    times = symbol(size) / num_tokens
    return int(times) if getattr(times, "is_Integer", False) and times > 1 else None


def _parts(start: fx.Node, behind: bool, heads: int, num_tokens: Any) -> tuple[int, int] | None:
    """What the rows are split into at the first node behind `start`, or in front of it, where they are: (-1, heads) or (heads, -1)."""
    flat = sizes_of(start)

    def onwards(node: fx.Node) -> Iterator[fx.Node]:
        return (other for other in (node.users if behind else node.all_input_nodes) if token_dims(other, num_tokens) >= 2)

    for node in reached([start], onwards):
        sizes = sizes_of(node)
        if sizes[:-3] == flat[:-2] and sizes[-1] == flat[-1] and sizes[-3:-1] in ((num_tokens, heads), (heads, num_tokens)):
            return (heads, -1) if sizes[-3] == heads else (-1, heads)
    return None


def _split(product: Product, parts: tuple[int, int]) -> None:
    graph, node = product.node.graph, product.node
    new = next(letter for letter in "PQRSTUVW" if letter not in product.left_labels + product.right_labels)
    left_labels = product.left_labels[:-1] + new + product.inner
    layout = product.layout[:-1] + new + product.column
    with graph.inserting_before(node):
        left = call_with_value(graph, "unflatten", product.left, -2, parts)
        equation = f"{left_labels},{product.right_labels}->{layout}"
        split = call_with_value(graph, torch.einsum, equation, left, product.right)
        result = call_with_value(graph, "flatten", split, -3, -2)
    keep_origin(node, split)
    take_place(node, result, left, split)
