"""Replaces an attention over a latent by the op that keeps one row per token.

Before: k, v = heads of linear(latent [1, T, rank], weight), the shared part beside the keys; out = attention(q [1, H, T, D], k, v)
After:  o = aten.new_empty(q', [T, H, Dv]); latent_attention_with_output(q', latent' [T, rank], rotated' [T, r], weight_k, weight_v, o,
        layer_id); out = o^T[None]. The product with the weight is dead code afterwards, unless something else uses it.
A bias of values goes to the op, one of keys is dropped; values that are padded with zeros give zeros. Weights that are not [rows, rank] are
passed as views.
"""

from __future__ import annotations

import itertools

import torch
from torch import fx
from torch.fx.node import Argument

from paged_attn.attn_ops.ops.latent import LATENT_ATTENTION
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.passes.find.attention_site import AttentionSite
from paged_attn.passes.fx.graph_tools import shape_of, value_of
from paged_attn.passes.prove.attention import AttentionProof
from paged_attn.passes.prove.latent import LatentProof, WeightRows
from paged_attn.passes.replace.attention import converted, operand, tokens_and_output, use_output
from paged_attn.passes.replace.kv_heads import as_received

aten = torch.ops.aten


def replace_latent(
    site: AttentionSite, latent: LatentProof, proof: AttentionProof, layer_id: int, pool_dtype: torch.dtype
) -> tuple[LatentSpec, fx.Node, fx.Node]:
    """Replaces one site in place; returns the spec, the op's node, and the node that replaces the old output."""
    graph, found, maps = site.node.graph, latent.site, latent.maps
    heads, key_dim = int(shape_of(site.query)[1]), maps.plain[1] - maps.plain[0]
    spec = LatentSpec(
        num_q_heads=heads,
        num_kv_heads=1,
        qk_head_dim=found.rank + found.num_rotated,
        v_head_dim=found.rank,
        scale=proof.function.scale,
        kv_layer=layer_id,
        module=site.module,
        rotated=found.num_rotated,
        key_dim=key_dim,
        value_dim=maps.value_dim,
        rotated_first=found.num_rotated > 0 and maps.shared < maps.plain,
        keys=None if maps.keys is None else maps.keys.rows,
        values=None if maps.values is None else maps.values.rows,
    )
    with graph.inserting_before(site.node):
        query = _columns(operand(as_received(site.query, heads), pool_dtype), latent, int(shape_of(site.query)[3]))
        row = _row(found.latent, found.rank, pool_dtype)
        rotated = None if found.rotated is None else _row(found.rotated, found.num_rotated, pool_dtype)
        _, output = tokens_and_output(query, heads, maps.value_dim)
        weight_k, weight_v = _weight(latent, maps.keys, heads, key_dim), _weight(latent, maps.values, heads, maps.value_dim)
        extra = {} if maps.bias is None else {"bias": _bias(latent, maps.bias, heads)}
        op = graph.call_function(LATENT_ATTENTION, (query, row, rotated, weight_k, weight_v, output, layer_id), dict[str, Argument](extra))
        padding = int(shape_of(site.value)[3]) - maps.value_dim
        result = graph.call_function(aten.constant_pad_nd.default, (output, [0, padding])) if padding else output
    made = [
        query,
        row,
        *(node for node in (rotated, weight_k, weight_v, *extra.values()) if node is not None and node.op != "placeholder"),
        output,
        op,
    ]
    return spec, op, use_output(site, result, made, pool_dtype)


def _row(node: fx.Node, width: int, dtype: torch.dtype) -> fx.Node:
    """[T, width] in the pool's dtype."""
    rows = node.graph.call_function(aten.reshape.default, (node, [-1, width]))
    return converted(rows, value_of(node).dtype, dtype)


def _columns(query: fx.Node, latent: LatentProof, width: int) -> fx.Node:
    """Queries without the elements that meet constants, which add the same to all scores."""
    parts = [part for part in sorted((latent.maps.plain, latent.maps.shared)) if part[1] > part[0]]
    if parts[0][0] == 0 and parts[-1][1] == width and all(one[1] == two[0] for one, two in itertools.pairwise(parts)):
        return query
    cut = [query.graph.call_function(aten.slice.Tensor, (query, 2, *part)) for part in parts]
    return query.graph.call_function(aten.cat.default, (cut, -1))


def _weight(latent: LatentProof, rows: WeightRows | None, heads: int, dim: int) -> fx.Node | None:
    """The op's weight [rows, rank]."""
    if rows is None:
        return None
    weight, view = latent.site.owned[rows.number], rows.view(heads, dim, latent.site.rank)
    return weight if view is None else weight.graph.call_function(aten.as_strided.default, (weight, *map(list, view)))


def _bias(latent: LatentProof, bias: WeightRows, heads: int) -> fx.Node:
    """[heads, value_dim]"""
    node, (start, stride, step) = latent.site.owned[bias.number], bias.rows
    flat = node.graph.call_function(aten.reshape.default, (node, [-1]))
    behind = node.graph.call_function(aten.slice.Tensor, (flat, 0, start, 2**63 - 1))  # an offset of as_strided is that in memory
    return node.graph.call_function(aten.as_strided.default, (behind, [heads, latent.maps.value_dim], [stride, step]))
