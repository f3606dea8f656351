"""Finds attention that is written out, by walking from each softmax: back to the product q.k, forward to the product with v.

Before: weights = softmax(f(q @ k^T) + mask); out = dropout(weights) @ v, in any layout: 3-D, 4-D, grouped 5-D, bmm, baddbmm, einsum
After:  q, k, v as [1, heads, T, dim] and a stand-in for out, which `replace_attention` turns into the op. What happens between the
        products is not matched; `score_function` and `mask_proof` prove it.
Declines: a softmax that is not over tokens against tokens (a router's, a pooling's). Raises for one that is, but does not have this form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx

from paged_attn.passes.find.attention_site import AttentionSite, UnknownAttention, WrittenScores, attention_stand_in, module_path
from paged_attn.passes.find.dual_chunk import find_dual_chunk
from paged_attn.passes.find.products import Product, other_uses, score_products, split_baddbmm, weighted_sums
from paged_attn.passes.find.spellings.combined_weights import distribute_products
from paged_attn.passes.find.spellings.decompose_flex import decompose_flex
from paged_attn.passes.find.spellings.flattened_rows import split_rows
from paged_attn.passes.find.spellings.score_layout import bring_to_layout, token_axes
from paged_attn.passes.find.spellings.summed_products import join_sums
from paged_attn.passes.find.weights_as_softmax import softmaxes_of_weights
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import argument_of, call_with_value, op_name, shape_of, symbol
from paged_attn.passes.fx.memory import move_before

_SOFTMAX = {
    F.softmax,
    torch.softmax,
    getattr(torch._C._nn, "softmax", F.softmax),
    torch.ops.aten.softmax.int,
    torch.ops.aten._softmax.default,
}


def find_softmax(graph: fx.Graph, form: CallForm) -> list[AttentionSite]:
    """Every written-out attention of a paged call, in order. Adds nodes to `graph` that bring q, k, v and the result into layout.

    Raises:
        UnknownAttention: scores of tokens against tokens whose products cannot be found; the message names the module.
    """
    if form.reason or isinstance(form.num_tokens, int):
        return []
    decompose_flex(graph)
    softmaxes = [node for node in graph.nodes if is_softmax(node) and token_axes(node, form.num_tokens) is not None]
    split_baddbmm(graph, form.num_tokens)
    split_rows(graph, form.num_tokens)
    join_sums(graph, form.num_tokens)
    softmaxes = [bring_to_layout(node, form.num_tokens) for node in softmaxes]
    distribute_products(graph, softmaxes, form.num_tokens)
    of_weights = softmaxes_of_weights(graph, set(softmaxes), form.num_tokens)
    sites, taken = find_dual_chunk(softmaxes, form)
    return [*sites, *(_site(node, form, of_weights.get(node)) for node in (*softmaxes, *of_weights) if node not in taken)]


def is_softmax(node: fx.Node) -> bool:
    return (node.op == "call_function" and node.target in _SOFTMAX) or (node.op == "call_method" and node.target == "softmax")


@dataclass(frozen=True)
class _Walk:
    """The nodes around one softmax."""

    softmax: fx.Node
    form: CallForm
    of_weights: Product | None  # the product with values, if this softmax stands in for weights that the model computes in another way

    @property
    def where(self) -> str:
        return f"layer at {module_path(self.softmax) or self.softmax.name}"

    def refusal(self, why: str) -> UnknownAttention:
        return UnknownAttention(
            module_path(self.softmax),
            f"{self.where}: attention that is written out as a softmax is not of a known form: {why}. "
            "If the model offers it, load it with attn_implementation='sdpa'. LLM(model) runs a module that returns one row per token as "
            "it is, on all tokens; otherwise run the model without paged_attn, or report it.",
        )

    def scores(self) -> fx.Node:
        """The input of the softmax."""
        node, dim = argument_of(self.softmax, 0, "input"), argument_of(self.softmax, 1, "dim")
        assert isinstance(node, fx.Node)
        if dim not in (-1, len(shape_of(node)) - 1):
            raise self.refusal(f"the softmax runs over dim {dim} of {len(shape_of(node))}, not over the last")
        return node

    def products(self) -> Product:
        """q.k: the one matrix product in the scores whose factors have a token dim each."""
        found = score_products(self.scores(), self.form.num_tokens)
        if len(found) != 1:
            raise self.refusal(
                "no matrix product of queries and keys was found" if not found else f"its scores are the sum of {len(found)} products"
            )
        if found[0].layout != found[0].labels:
            raise self.refusal(f"its scores are laid out as {found[0].layout}, not with queries and keys as the last two dims")
        return found[0]

    def weighted_sum(self) -> Product:
        """The product of the weights with v."""
        found = [self.of_weights] if self.of_weights else weighted_sums(self.softmax, self.form.num_tokens)
        if len(found) != 1:
            raise self.refusal(f"its weights are multiplied with values in {len(found)} places; known is one")
        weights = self.of_weights.left if self.of_weights else self.softmax
        if others := other_uses(weights, {found[0].node}, self.form.num_tokens):
            raise self.refusal(f"its weights go into {others[0].name}, too, and not only into a product with values")
        return found[0]

    def log_sum_exp(self) -> fx.Node | None:
        """A logsumexp of the same scores over the last dim."""
        users = [user for user in self.scores().users if op_name(user) == "logsumexp"]
        for user in users:
            dim = argument_of(user, 1, "dim")
            if user.kwargs.get("keepdim") or len(user.args) > 2 or dim not in (-1, (-1,), [-1]) or len(users) > 1:
                raise self.refusal("the logsumexp of its scores is not one over the last dim, without keepdim")
        return users[0] if users else None


def _site(softmax: fx.Node, form: CallForm, of_weights: Product | None) -> AttentionSite:
    walk = _Walk(softmax, form, of_weights)
    products, output = walk.products(), walk.weighted_sum()
    try:
        heads = {products.num_heads, output.num_heads}
    except ValueError as error:
        raise walk.refusal(str(error)) from error
    if len(heads) != 1:
        raise walk.refusal(f"its scores have {products.num_heads} heads and its values {output.num_heads}")
    tokens = [shape_of(n)[labels.index(label)] for n, labels, label in (
        (products.left, products.left_labels, products.row), (products.right, products.right_labels, products.column),
        (output.right, output.right_labels, output.inner))]  # fmt: skip
    if any(symbol(size) != form.num_tokens for size in tokens):
        raise walk.refusal(f"its queries, keys and values have lengths {tokens} in a call of {form.num_tokens} tokens")
    part = math.prod(int(size) for size in shape_of(softmax)[:-2])
    if part != products.num_heads:
        raise walk.refusal(f"its softmax runs over {part} of the {products.num_heads} heads of its scores")
    lse = walk.log_sum_exp()
    # The log-sum-exp may be used before the weights meet the values; the op, which computes both, must come before either use.
    before = lse or output.node
    if not move_before(before, (products.left, products.right, output.right)):
        raise walk.refusal("its values are made from the logsumexp of its scores")
    query = products.emit_factor("left", products.row, products.inner, before)
    key = products.emit_factor("right", products.column, products.inner, before)
    value = output.emit_factor("right", output.inner, output.column, before)
    with softmax.graph.inserting_before(before):
        stand_in = call_with_value(softmax.graph, attention_stand_in, query, key, value)
    stand_in.meta["nn_module_stack"] = softmax.meta.get("nn_module_stack")
    result = output.emit_result(stand_in, before)
    output.node.replace_all_uses_with(result)
    scores = WrittenScores(products.node, walk.scores(), softmax, output.left, output.node, lse, of_weights is not None)
    original = output.node.meta.get("original_name", output.node.name)
    found_by = output.node.meta.get("found_by", "softmax")
    if of_weights is not None:
        found_by = "weights without a softmax"
    return AttentionSite(stand_in, query, key, value, scores, found_by, original, output.to_canonical)
