"""Finds attention whose tokens have three queries over the same keys, as dual chunk attention has, however it is written.

Before: s0, s1, s2 = q0 @ k^T, q1 @ k^T, q2 @ k^T; out = softmax(where(.., s0, where(.., s1, s2)) + mask) @ v
        or three softmaxes whose products with v are merged by the log-sum-exps of their scores
After:  q0, q1, q2, k, v as [1, heads, T, dim] and a stand-in for out. What happens between the products and out is not matched: everything
        that depends on the three products, up to the value where they meet, is taken, and `passes/prove/dual_chunk.py` proves what that
        computes.
Declines: other numbers of products, products with different keys, and three that do not come together in one value with a row per token.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from paged_attn.passes.find.attention_site import AttentionSite, DualChunkScores, attention_stand_in, module_path
from paged_attn.passes.find.products import Product, product_of, score_products
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import argument_of, call_with_value, op_name, sizes_of, token_dims
from paged_attn.passes.fx.memory import bases_of, writes_in_place, written_values

QUERIES = 3
_MAX_DEPTH = 12  # most operations (transposes, repetitions of heads) compared behind two keys


def find_dual_chunk(softmaxes: Sequence[fx.Node], form: CallForm) -> tuple[list[AttentionSite], set[fx.Node]]:
    """Sites of three queries each, and the softmaxes that belong to them. Adds nodes to the graph that bring the operands into layout.

    Args:
        softmaxes: all softmaxes over tokens against tokens.
    """
    sites, taken = [], set[fx.Node]()
    for group in _groups(softmaxes, form):
        site = _site([product for _, products in group for product in products], group[0][0], form)
        if site is not None:
            sites.append(site)
            taken |= {softmax for softmax, _ in group}
    return sites, taken


_Found = tuple[fx.Node, list[Product]]


def _groups(softmaxes: Sequence[fx.Node], form: CallForm) -> list[list[_Found]]:
    """Groups of one softmax over three products, or of three softmaxes with one product and a log-sum-exp each, in one module and over
    the same keys."""
    groups: list[list[_Found]] = []
    parts: list[_Found] = []
    for softmax in softmaxes:
        scores = argument_of(softmax, 0, "input")
        assert isinstance(scores, fx.Node)
        found = score_products(scores, form.num_tokens)
        if any(product.layout != product.labels for product in found):
            continue
        if len(found) == QUERIES:
            groups.append([(softmax, found)])
        elif len(found) == 1 and any(op_name(user) == "logsumexp" for user in scores.users):
            if parts and (module_path(parts[0][0]) != module_path(softmax) or not _same(parts[0][1][0].right, found[0].right)):
                parts = []
            parts.append((softmax, found))
            if len(parts) == QUERIES:
                groups.append(parts)
                parts = []
    return groups


def _site(products: list[Product], softmax: fx.Node, form: CallForm) -> AttentionSite | None:
    if not all(_same(products[0].right, product.right) for product in products[1:]):
        return None
    weighted = _weighted(products, form)
    if not weighted or not all(_same(weighted[0].right, product.right) for product in weighted[1:]):
        return None
    value = weighted[0]
    try:
        leads = {tuple(product.lead_sizes) for product in (*products, value)}
    except ValueError:
        return None
    output = _way_out([product.node for product in products], value.node, form)
    if len(leads) != 1 or output is None:
        return None
    operands = bases_of(each for product in (*products, value) for each in (product.left, product.right) if each is not value.left)
    first = min(product.node for product in products)
    if any(first < node < output and written_values(node) & operands for node in output.graph.nodes):
        return None
    queries = tuple(product.emit_factor("left", product.row, product.inner, output) for product in products)
    key = products[0].emit_factor("right", products[0].column, products[0].inner, output)
    values = value.emit_factor("right", value.inner, value.column, output)
    with output.graph.inserting_before(output):
        stand_in = call_with_value(output.graph, attention_stand_in, *queries, key, values)
    stand_in.meta["nn_module_stack"] = softmax.meta.get("nn_module_stack")
    output.replace_all_uses_with(value.emit_result(stand_in, output))
    scores = DualChunkScores(tuple(products), tuple(weighted), output, queries)
    original = output.meta.get("original_name", output.name)
    found_by = "softmax of three products" if len(weighted) == 1 else "three softmaxes, merged by log-sum-exps"
    return AttentionSite(stand_in, queries[0], key, values, scores, found_by, original, value.to_canonical)


def _weighted(products: Sequence[Product], form: CallForm) -> list[Product]:
    """The products of weights, made of the scores only, with values: one, or one for each query; empty for any other number."""
    scores, found = {product.node for product in products}, []
    for node in products[0].node.graph.nodes:
        if not any(source in scores for source in node.all_input_nodes):
            continue
        product = product_of(node)
        if product is not None and product.left in scores and token_dims(product.right, form.num_tokens) == 1:
            found.append(product)
        elif token_dims(node, form.num_tokens) >= 2:
            scores.add(node)
    return found if len(found) in (1, QUERIES) else []


def _way_out(products: Sequence[fx.Node], like: fx.Node, form: CallForm) -> fx.Node | None:
    """The first node, of the shape of `like`, that depends on all three products and is their only path to the rest of the graph."""
    made_of: dict[fx.Node, set[fx.Node]] = {product: {product} for product in products}
    last = max(user for product in products for user in product.users)  # the last use so far
    node: fx.Node
    for node in like.graph.nodes:
        sources = set[fx.Node]().union(*(made_of.get(each, ()) for each in node.all_input_nodes))
        if not sources:
            continue
        written = written_values(node) - {node}
        if node in made_of or not written <= made_of.keys():
            return None  # a query depends on another query's scores, or scores are written where other nodes may read them
        for each in (node, *written):
            made_of[each] = made_of.get(each, set()) | sources
        if len(sources) == len(products) and last <= node and token_dims(node, form.num_tokens) == 1:
            if sizes_of(node) == sizes_of(like):
                return node
            if len(sizes_of(node)) <= len(sizes_of(like)):
                return None  # the value has become part of another one
        last = max(last, *node.users) if node.users else last
    return None


def _same(one: fx.Node, other: fx.Node, depth: int = _MAX_DEPTH) -> bool:
    """Whether two nodes are identical, or apply the same operation to the same nodes, none of which is written in place."""
    if one is other:
        return True
    if depth == 0 or one.op not in ("call_function", "call_method") or (one.op, one.target) != (other.op, other.target):
        return False
    if any(writes_in_place(user) for node in (one, other) for user in (node, *node.users)):
        return False
    inputs: tuple[list[fx.Node], list[fx.Node]] = [], []
    arguments = [repr(fx.map_arg((node.args, dict(node.kwargs)), nodes.append)) for node, nodes in zip((one, other), inputs, strict=True)]
    return arguments[0] == arguments[1] and all(_same(*pair, depth - 1) for pair in zip(*inputs, strict=True))
