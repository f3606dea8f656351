"""Find `F.scaled_dot_product_attention` in all its call forms.

Before: `out = F.sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale=s, enable_gqa=g)`, positional or by keyword.
Declines: dropout above 0; q, k, v that are not [1, heads, T, dim]; keys of another length than the queries.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.find.attention_site import AttentionSite, SdpaScores, module_path
from paged_attn.passes.fx.call_form import CallForm, CallNotPaged
from paged_attn.passes.fx.graph_tools import arguments_of, depends_on, shape_of, symbol, value_of

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
TARGETS = {F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}


def find_sdpa(graph: fx.Graph, form: CallForm) -> list[AttentionSite]:
    """Every scaled_dot_product_attention call of the graph, in order."""
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target in TARGETS]
    return [_site(node, form) for node in calls if form.reason or not _within_tokens(node, form)]


def _within_tokens(node: fx.Node, form: CallForm) -> bool:
    """Whether it attends within each token (over layers or parts of it): tokens are among its batch dims, not its queries or keys."""
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
    if any(len(shape) != 4 for shape in shapes):
        raise UnsupportedError(f"{where}: q, k, v have shapes {[list(s) for s in shapes]}; known is [batch, heads, tokens, dim]")
    lengths = [symbol(shape[2]) for shape in shapes]
    if lengths[0] != lengths[1]:
        raise CallNotPaged(
            f"{where}: {shapes[0][2]} queries attend to {shapes[1][2]} keys, so the call brings a cache or another sequence of its own"
        )
    if not form.reason and any(symbol(shape[0]) != 1 for shape in shapes):
        raise UnsupportedError(f"{where}: q, k, v have shapes {[list(s) for s in shapes]}; known is one row, [1, heads, tokens, dim]")
    if not form.reason and lengths[0] != form.num_tokens:
        raise UnsupportedError(f"{where}: it attends over {shapes[0][2]} positions, not over the {form.num_tokens} tokens of the call")
    scale = given.get("scale")
    if isinstance(scale, fx.Node):
        raise UnsupportedError(f"{where}: its scale ({scale.name}) is computed in the graph, from the number of tokens; known is a number")
    scores = SdpaScores(
        given.get("attn_mask"), bool(given.get("is_causal", False)), float(scale) if scale is not None else 1.0 / math.sqrt(shapes[0][3])
    )
    return AttentionSite(node, query, key, value, scores, "F.sdpa", node.name)
