"""Replaces an attention over a latent by the op that keeps one row per token.

Before: k, v = heads of linear(latent [1, T, rank], weight), the shared part beside the keys; out = attention(q [1, H, T, D], k, v)
After:  o = aten.new_empty(q', [T, H, Dv]); latent_attention_with_output(q', latent' [T, rank], rotated' [T, r], weight_k, weight_v, o,
        layer_id); out = o^T[None]. The product with the weight is dead code afterwards, unless something else uses it.
"""

from __future__ import annotations

import torch
from torch import fx

from paged_attn.attn_ops.ops.latent import LATENT_ATTENTION
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.passes.find.attention_site import AttentionSite
from paged_attn.passes.fx.graph_tools import shape_of, value_of
from paged_attn.passes.prove.attention import AttentionProof
from paged_attn.passes.prove.latent import LatentProof
from paged_attn.passes.replace.attention import converted, operand, tokens_and_output, use_output
from paged_attn.passes.replace.kv_heads import as_received

aten = torch.ops.aten


def replace_latent(
    site: AttentionSite, latent: LatentProof, proof: AttentionProof, layer_id: int, pool_dtype: torch.dtype
) -> tuple[LatentSpec, fx.Node, fx.Node]:
    """Replaces one site in place; returns the spec, the op's node, and the node that replaces the old output."""
    graph, found = site.node.graph, latent.site
    heads = int(shape_of(site.query)[1])
    spec = LatentSpec(
        num_q_heads=heads,
        num_kv_heads=1,
        qk_head_dim=found.rank + found.num_rotated,
        v_head_dim=found.rank,
        scale=proof.function.scale,
        kv_layer=layer_id,
        module=site.module,
        rotated=found.num_rotated,
        key_dim=latent.key_dim,
        value_dim=latent.value_dim,
        rotated_first=latent.rotated_first,
        keys=latent.keys,
        values=latent.values,
    )
    with graph.inserting_before(site.node):
        query = operand(as_received(site.query, heads), pool_dtype)
        row = _row(found.latent, found.rank, pool_dtype)
        rotated = None if found.rotated is None else _row(found.rotated, found.num_rotated, pool_dtype)
        _, output = tokens_and_output(site.query, query, heads, spec.value_dim)
        op = graph.call_function(LATENT_ATTENTION, (query, row, rotated, latent.weight_k, latent.weight_v, output, layer_id))
    made = [query, row, *([] if rotated is None else [rotated]), op]
    return spec, op, use_output(site, output, made, pool_dtype)


def _row(node: fx.Node, width: int, dtype: torch.dtype) -> fx.Node:
    """[T, width] in the pool's dtype."""
    rows = node.graph.call_function(aten.reshape.default, (node, [-1, width]))
    return converted(rows, value_of(node).dtype, dtype)
