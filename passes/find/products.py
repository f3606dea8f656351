"""Batched matrix products in all their spellings (matmul, @, bmm, einsum), read as one einsum of two factors.

Before: `torch.einsum("bqhd,bkhd->bhqk", q, k)`, `q @ k.transpose(-1, -2)`, `torch.bmm(q, k)`, `bias.baddbmm(q, k, beta=1, alpha=s)`
After:  a `Product` that can emit either factor as [1, heads, rows, columns], whatever the layout it came in
Declines (returns None): einsums of more than two factors, with repeated or summed-out labels.
"""

from __future__ import annotations

import math
import operator
import string
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.passes.fx.graph_tools import arguments_of, call_with_value, name_of, reached, shape_of, take_place, token_dims, value_of

_MATMUL = {torch.matmul, torch.bmm, operator.matmul, torch.ops.aten.matmul.default, torch.ops.aten.bmm.default}
_MATMUL_METHODS = {"matmul", "bmm", "__matmul__"}


@dataclass(frozen=True)
class Product:
    """node[layout] = sum over `inner` of left[left_labels] * right[right_labels]; rows come from left, columns from right."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    left_labels: str
    right_labels: str
    lead: str
    row: str
    inner: str
    column: str
    layout: str

    @property
    def labels(self) -> str:
        """Labels of the canonical result [lead..., rows, columns]."""
        return self.lead + self.row + self.column

    @property
    def to_canonical(self) -> tuple[int, ...]:
        """The permutation of the node's dims to `labels`."""
        return tuple(self.layout.index(label) for label in self.labels)

    @property
    def lead_sizes(self) -> list[int]:
        """The static sizes of the lead (batch and head) dims.

        Raises:
            ValueError: a lead dim depends on the number of tokens.
        """
        sizes: dict[str, Any] = {}
        for node, labels in ((self.left, self.left_labels), (self.right, self.right_labels)):
            for label, size in zip(labels, shape_of(node), strict=True):
                if label in self.lead and (label not in sizes or sizes[label] == 1):
                    sizes[label] = size
        if any(not isinstance(size, int) for size in sizes.values()):
            raise ValueError(f"its products run over lead dims of {list(sizes.values())}")
        return [int(sizes[label]) for label in self.lead]

    @property
    def num_heads(self) -> int:
        """Product of all lead dims, since batch is 1 in a paged call."""
        return math.prod(self.lead_sizes)

    def emit_factor(self, which: str, rows: str, columns: str, before: fx.Node) -> fx.Node:
        """Inserts nodes before `before` that give the "left" or "right" factor as [1, heads, rows, columns]."""
        node, labels = (self.left, self.left_labels) if which == "left" else (self.right, self.right_labels)
        present = [label for label in self.lead if label in labels]
        order = [labels.index(label) for label in (*present, rows, columns)]
        graph = node.graph
        with graph.inserting_before(before):
            if order != list(range(len(order))):
                node = call_with_value(graph, "permute", node, order)
            for position, label in enumerate(self.lead):
                if label not in labels:
                    node = call_with_value(graph, "unsqueeze", node, position)
            sizes = self.lead_sizes
            if [*shape_of(node)[: len(sizes)]] != sizes:
                node = call_with_value(graph, "expand", node, [*sizes, -1, -1])
            if sizes[:-1] != [1] or len(sizes) != 2:
                node = call_with_value(graph, "reshape", node, [1, self.num_heads, -1, shape_of(node)[-1]])
        return node

    def emit_result(self, canonical: fx.Node, before: fx.Node) -> fx.Node:
        """Inserts nodes that bring a [1, heads, rows, columns] node into the layout of `self.node`."""
        graph = canonical.graph
        order = [self.labels.index(label) for label in self.layout]
        with graph.inserting_before(before):
            node = call_with_value(graph, "reshape", canonical, [*self.lead_sizes, -1, shape_of(canonical)[-1]])
            return node if order == list(range(len(order))) else call_with_value(graph, "permute", node, order)


def product_of(node: fx.Node) -> Product | None:
    """The product that a node computes, or None."""
    if node.op == "call_function" and node.target in (torch.einsum, torch.functional.einsum):
        parsed = _einsum(node)
    elif (node.op == "call_function" and node.target in _MATMUL) or (node.op == "call_method" and node.target in _MATMUL_METHODS):
        parsed = _matmul(node)
    else:
        return None
    return parsed and _classify(node, *parsed)


def score_products(scores: fx.Node, num_tokens: Any) -> list[Product]:
    """The matrix products that scores [.., T, T] contain and whose factors have one token dim each, in graph order."""
    found: dict[fx.Node, Product] = {}
    pending, seen = [scores], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen or token_dims(node, num_tokens) < 2 or not value_of(node).is_floating_point():
            continue  # a mask may be made from scores but contains none
        seen.add(node)
        product = product_of(node)
        if product is not None and all(token_dims(n, num_tokens) == 1 for n in (product.left, product.right)):
            found[node] = product
        else:
            pending += node.all_input_nodes
    return [found[node] for node in sorted(found)]


def weighted_sums(softmax: fx.Node, num_tokens: Any) -> list[Product]:
    """The products of a softmax's weights, after any operations on them, with a tensor that has one token dim."""

    def summed(weights: fx.Node, user: fx.Node) -> Product | None:
        product = product_of(user)
        return product if product is not None and weights is product.left and token_dims(product.right, num_tokens) == 1 else None

    def onwards(weights: fx.Node) -> list[fx.Node]:
        return [user for user in weights.users if token_dims(user, num_tokens) >= 2 and summed(weights, user) is None]

    pairs = ((user, summed(node, user)) for node in reached([softmax], onwards) for user in node.users)
    return list({user: product for user, product in pairs if product is not None}.values())


def other_uses(weights: fx.Node, known: Collection[fx.Node], num_tokens: Any) -> list[fx.Node]:
    """Values made from the weights that have one row per token and reach the graph's output, except those in `known`."""
    wide = reached([weights], lambda node: (user for user in node.users if token_dims(user, num_tokens) >= 2))
    rows = [user for node in wide for user in node.users if user not in known and token_dims(user, num_tokens) == 1]
    return [row for row in rows if any(node.op == "output" for node in reached([row], lambda node: node.users))]


def split_baddbmm(graph: fx.Graph, num_tokens: Any) -> None:
    """Replaces `baddbmm(input, a, b, beta=, alpha=)` of scores or weights by beta * input + alpha * bmm(a, b).

    With beta=0 the input is not read, as in PyTorch: an unfilled buffer may hold NaN.
    """
    for node in list(graph.nodes):
        if name_of(node) != "baddbmm":
            continue
        given = arguments_of(node, ("input", "batch1", "batch2"))
        if max(token_dims(node, num_tokens), token_dims(given["batch1"], num_tokens)) < 2:
            continue
        with graph.inserting_before(node):
            product = call_with_value(graph, torch.bmm, given["batch1"], given["batch2"])
            terms = []
            for term, factor in ((given["input"], given.get("beta", 1)), (product, given.get("alpha", 1))):
                if factor != 0 or term is product:
                    terms.append(term if factor == 1 else call_with_value(graph, operator.mul, term, factor))
            result = call_with_value(graph, operator.add, *terms) if len(terms) == 2 else terms[0]
        take_place(node, result, product)


def _einsum(node: fx.Node) -> tuple[fx.Node, fx.Node, str, str, str] | None:
    equation, *factors = node.args
    if len(factors) == 1 and isinstance(factors[0], (tuple, list)):
        factors = list(factors[0])
    if not isinstance(equation, str) or "->" not in equation or len(factors) != 2:
        return None
    left, right = factors
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    inputs, output = equation.replace(" ", "").split("->")
    if inputs.count(",") != 1:
        return None
    first, second = inputs.split(",")
    spare = [c for c in string.ascii_letters if c not in equation]
    first, width = _without_ellipsis(first, len(shape_of(left)), spare)
    second, other = _without_ellipsis(second, len(shape_of(right)), spare)
    output, _ = _without_ellipsis(output, len(output.replace("...", "")) + max(width, other), spare)
    return left, right, first, second, output


def _without_ellipsis(labels: str, dims: int, spare: list[str]) -> tuple[str, int]:
    if "..." not in labels:
        return labels, 0
    width = dims - (len(labels) - 3)
    return labels.replace("...", "".join(spare[:width][::-1])), width  # aligned on the right, as in broadcasting


def _matmul(node: fx.Node) -> tuple[fx.Node, fx.Node, str, str, str] | None:
    given = [*node.args, *node.kwargs.values()]
    factors = [n for n in given if isinstance(n, fx.Node) and isinstance(value_of(n), Tensor)]
    if len(given) != 2 or len(factors) != 2:
        return None
    left, right = factors
    dims = [len(shape_of(n)) for n in factors]
    if min(dims) < 2:
        return None
    lead = string.ascii_lowercase[: max(dims) - 2]
    return left, right, lead[max(dims) - dims[0] :] + "XY", lead[max(dims) - dims[1] :] + "YZ", lead + "XZ"


def _classify(node: fx.Node, left: Any, right: Any, first: str, second: str, output: str) -> Product | None:
    if any(len(set(labels)) != len(labels) for labels in (first, second, output)):
        return None
    inner = [label for label in first if label in second and label not in output]
    rows = [label for label in output if label in first and label not in second]
    columns = [label for label in output if label in second and label not in first]
    summed = [label for label in first + second if label not in output and label not in inner]
    if len(inner) != 1 or summed or not rows or not columns:
        return None
    # If there are several row labels, the row is the last one that counts tokens, wherever it stands ("bgrts,bsgd->btgrd"); the others
    # (a group of query heads) become lead dims.
    of_tokens = [label for label, size in zip(first, shape_of(left), strict=True) if label in rows and not isinstance(size, int)]
    row, column = max(of_tokens or rows, key=output.index), columns[-1]
    lead = "".join(label for label in output if label not in (row, column))
    if output.index(row) > output.index(column):  # einsum("kd,qd->qk", k, q)
        left, right, first, second, row, column = right, left, second, first, column, row
    return Product(node, left, right, first, second, lead, row, inner[0], column, output)
