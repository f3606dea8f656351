"""Finds `F.scaled_dot_product_attention` in all its call forms.

Before: `out = F.sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale=s, enable_gqa=g)`, positional or by keyword.
After:  the same on [1, heads, T, dim], where q, k, v are [heads, T, dim] or [1, groups, heads, T, dim]
Declines: dropout above 0; q, k, v of more than one row; keys of another length than the queries.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.find.attention_site import AttentionSite, OtherTokens, SdpaScores, UnknownAttention, attention_stand_in, module_path
from paged_attn.passes.fx.call_form import CallForm, CallNotPaged
from paged_attn.passes.fx.graph_tools import arguments_of, call_of_value, call_with_value, depends_on, shape_of, symbol, value_of

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
TARGETS = {F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}


def find_sdpa(graph: fx.Graph, form: CallForm) -> list[AttentionSite]:
    """Every scaled_dot_product_attention call of the graph, in order."""
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target in TARGETS]
    return [_site(node, form) for node in calls if form.reason or not _within_tokens(node, form)]


def _within_tokens(node: fx.Node, form: CallForm) -> bool:
    """Whether it attends within each token (over layers, or parts of a token): the tokens are in a batch dim, not queries or keys."""
    operands = [n for n in (*node.args[:3], *node.kwargs.values()) if isinstance(n, fx.Node) and isinstance(value_of(n), Tensor)]
    shapes = [shape_of(n) for n in operands[:3]]
    lengths_fixed = not any(depends_on(size, form.num_tokens) for shape in shapes for size in shape[-2:])
    return lengths_fixed and any(depends_on(size, form.num_tokens) for shape in shapes for size in shape[:-2])


def _site(node: fx.Node, form: CallForm) -> AttentionSite:
    given = arguments_of(node, _PARAMETERS)
    where = f"layer at {module_path(node) or node.name}"
    query, key, value = given["query"], given["key"], given["value"]
    if given.get("dropout_p", 0.0) != 0.0:
        raise UnsupportedError(f"{where}: attention dropout is {given['dropout_p']}; call model.eval() first")
    shapes = [shape_of(n) for n in (query, key, value)]
    if any(len(shape) != len(shapes[0]) or len(shape) < 2 for shape in shapes) or (len(shapes[0]) != 4 and given.get("enable_gqa")):
        raise UnsupportedError(f"{where}: q, k, v have shapes {[list(s) for s in shapes]}; known is [batch, heads, tokens, dim]")
    lengths = [symbol(shape[-2]) for shape in shapes]
    more = lengths[1] - lengths[0]
    if not form.reason and lengths[0] == form.num_tokens and more.is_Integer and more > 0:
        words = (
            f"{where}: {shapes[0][-2]} tokens attend to {shapes[1][-2]} keys. The {more} keys that belong to no token come from the module "
            "or a cache (prefix tuning, a null or zero key) and have no place in pages. LLM(model) runs a module that brings its own keys "
            "unchanged, on all tokens; otherwise run the model without paged_attn."
        )
        unknown = UnknownAttention(module_path(node), words)
        if form.positions is not None:
            raise unknown
        raise CallNotPaged(words) from unknown
    if lengths[0] != lengths[1]:
        raise CallNotPaged(
            f"{where}: {shapes[0][-2]} queries attend to {shapes[1][-2]} keys, so the call brings a cache or another sequence of its own"
        )
    if not form.reason and len(shapes[0]) == 4 and any(symbol(shape[0]) != 1 for shape in shapes):
        raise UnsupportedError(f"{where}: q, k, v have shapes {[list(s) for s in shapes]}; known is one row, [1, heads, tokens, dim]")
    if not form.reason and lengths[0] != form.num_tokens:
        added = lengths[0] - form.num_tokens
        if added.is_Integer and added > 0:
            raise OtherTokens(
                f"{where}: it attends over {added} positions more than the call has tokens: the model adds its own to every prompt "
                "(learned or meta tokens, a soft prompt), and pages hold keys and values of a request's tokens alone. Run this model "
                "without paged_attn."
            )
        raise OtherTokens(f"{where}: it attends over {shapes[0][-2]} positions, not over the {form.num_tokens} tokens of the call")
    scale = given.get("scale")
    if isinstance(scale, fx.Node):
        raise UnsupportedError(f"{where}: its scale ({scale.name}) is computed from the number of tokens; it must be a constant")
    scores = SdpaScores(
        given.get("attn_mask"), bool(given.get("is_causal", False)), float(scale) if scale is not None else 1.0 / math.sqrt(shapes[0][-1])
    )
    if form.reason or len(shapes[0]) == 4:
        return AttentionSite(node, query, key, value, scores, "F.sdpa", node.name)
    return _in_four_dims(node, given, scores, where)


def _in_four_dims(node: fx.Node, given: dict[str, Any], scores: SdpaScores, where: str) -> AttentionSite:
    """The site of the same call, with all dims in front of the tokens merged into one dim of heads."""
    graph, operands = node.graph, [given[name] for name in _PARAMETERS[:3]]
    shapes = [shape_of(operand) for operand in operands]
    lead = [max(sizes, key=lambda size: size != 1) for sizes in zip(*(shape[:-2] for shape in shapes), strict=True)]
    if not all(isinstance(size, int) for size in lead):
        raise UnsupportedError(f"{where}: q, k, v have shapes {[list(s) for s in shapes]}; known is [batch, heads, tokens, dim]")
    heads, mask = math.prod(lead), scores.mask
    with graph.inserting_before(node):
        query, key, value = (
            call_with_value(graph, "reshape", call_with_value(graph, "expand", operand, [*lead, -1, -1]), [1, heads, -1, shape[-1]])
            for operand, shape in zip(operands, shapes, strict=True)
        )
        if mask is not None and any(size != 1 for size in shape_of(mask)[:-2]):
            mask = call_with_value(graph, "expand", mask, [*lead, -1, -1])
            mask = call_with_value(graph, "unsqueeze", call_with_value(graph, "flatten", mask, 0, len(lead) - 1), 0)
        like = attention_stand_in(value_of(query), value_of(value))
        call = F.scaled_dot_product_attention
        new = call_of_value(graph, like, call, query, key, value, mask, 0.0, scores.is_causal, scale=scores.scale)
        result = call_with_value(graph, "reshape", new, [*lead, -1, shapes[2][-1]])
    for each in (new, result):
        each.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return AttentionSite(new, query, key, value, replace(scores, mask=mask), "F.sdpa", node.name, tuple(range(len(lead) + 2)))
