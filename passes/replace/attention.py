"""Replaces each proved attention by the paged op.

Before: out = F.sdpa(q [1, Hq, T, D], repeated k, repeated v, mask) [1, Hq, T, Dv]
After:  o = aten.new_empty(q', [T, Hq, Dv]); unified_attention_with_output(q', k', v', o, layer_id, save); out = o^T[None]
        with q' [T, Hq, D], k' [T, Hkv, D], v' [T, Hkv, Dv] as views; the mask and repeat_kv are dead code afterwards.
Sinks join the call as the model's own parameter [Hq]; sinks that are constants and tables of biases become buffers of the graph.
Query, key and value with another dtype than the pool's (models may rotate in float32) are cast before the op, and the result is cast back.
Only ATen overloads are emitted: torch.Tensor.new_empty would make AOTAutograd's cache bypass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx
from torch.fx.node import Argument

from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.passes.find.attention_site import AttentionSite, WrittenScores
from paged_attn.passes.fx.graph_tools import add_buffer, value_of
from paged_attn.passes.prove.attention import AttentionProof
from paged_attn.passes.replace.kv_heads import KVSource, as_received, head_rows

aten = torch.ops.aten


def replace_attention(
    site: AttentionSite, spec: AttentionSpec, layer_id: int, key: KVSource, value: KVSource, proof: AttentionProof, pool_dtype: torch.dtype
) -> tuple[fx.Node, fx.Node]:
    """Replaces one site in place; returns the op's node and the node that replaces the old output."""
    graph = site.node.graph
    with graph.inserting_before(site.node):
        query, keys, values = (operand(each, pool_dtype) for each in (as_received(site.query, spec.num_q_heads), key, value))
        tokens, output = tokens_and_output(query, spec.num_q_heads, spec.v_head_dim)
        extra = _extra_operands(graph, proof, layer_id)
        if spec.gives_lse:
            extra["lse_out"] = graph.call_function(aten.new_empty.default, (query, [tokens, spec.num_q_heads]), {"dtype": torch.float32})
        arguments = (query, keys, values, output, layer_id, spec.kv_layer == layer_id)
        op = graph.call_function(UNIFIED_ATTENTION, arguments, dict[str, Argument](extra))
        if "lse_out" in extra:
            _use_log_sum_exp(site, extra["lse_out"])
    return op, use_output(site, output, [query, keys, values, *extra.values(), op], pool_dtype)


def operand(source: KVSource, dtype: torch.dtype) -> fx.Node:
    """[T, heads, dim] in the pool's dtype, for an op; created at the graph's insertion point."""
    return converted(head_rows(source), value_of(source.base).dtype, dtype)


def tokens_and_output(query: fx.Node, num_heads: int, width: int) -> tuple[fx.Node, fx.Node]:
    """The number of tokens of an op's operand `query` [T, heads, dim], and an empty output [T, heads, width] like it."""
    tokens = query.graph.call_function(aten.sym_size.int, (query, 0))
    return tokens, query.graph.call_function(aten.new_empty.default, (query, [tokens, num_heads, width]))


def use_output(site: AttentionSite, output: fx.Node, made: Sequence[fx.Node], dtype: torch.dtype) -> fx.Node:
    """Puts an op's output, [T, heads, v_dim] of `dtype`, in the place of the attention's; returns the node that does so.

    Args:
        made: all other nodes that were created for the op.
    """
    graph = site.node.graph
    with graph.inserting_before(site.node):
        heads_first = graph.call_function(aten.transpose.int, (output, 0, 1))
        result = converted(graph.call_function(aten.unsqueeze.default, (heads_first, 0)), dtype, value_of(site.node).dtype)
    for node in (*made, output, heads_first, result):
        node.meta.setdefault("nn_module_stack", site.node.meta.get("nn_module_stack"))
    result.meta["example_value"] = site.node.meta.get("example_value")
    site.node.replace_all_uses_with(result)
    graph.erase_node(site.node)
    return result


def converted(node: fx.Node, present: torch.dtype, wanted: torch.dtype) -> fx.Node:
    """A node converted from its dtype `present`, which no example value tells, to `wanted`."""
    return node if present == wanted else node.graph.call_function(aten.to.dtype, (node, wanted))


def _extra_operands(graph: fx.Graph, proof: AttentionProof, layer_id: int) -> dict[str, fx.Node]:
    """sinks [Hq] and bias [Hq, N], if the layer has them."""
    extra: dict[str, fx.Node] = {}
    function, bias = proof.function, proof.bias
    if function.sinks is not None:
        extra["sinks"] = graph.call_function(aten.reshape.default, (function.sinks, [-1]))
    elif function.constant_sinks is not None:
        extra["sinks"] = add_buffer(graph, f"sinks_{layer_id}", torch.tensor(function.constant_sinks, device=proof.device))
    if bias is not None and bias.table is not None:
        extra["bias"] = add_buffer(graph, f"bias_{layer_id}", torch.from_numpy(bias.table).float().to(proof.device))
    return extra


def _use_log_sum_exp(site: AttentionSite, lse_out: fx.Node) -> None:
    """Puts lse_out [T, Hq] in the place of the graph's own logsumexp [lead.., T]."""
    assert isinstance(site.scores, WrittenScores) and site.scores.lse is not None
    graph, old = lse_out.graph, site.scores.lse
    value = value_of(old)
    heads_first = graph.call_function(aten.transpose.int, (lse_out, 0, 1))
    new = graph.call_function(aten.reshape.default, (heads_first, [*value.shape[:-1], -1]))
    new = graph.call_function(aten.to.dtype, (new, value.dtype))
    new.meta["example_value"] = value
    old.replace_all_uses_with(new)


def with_scaled_query(site: AttentionSite, by_head: Sequence[float], layer_id: int, device: torch.device) -> AttentionSite:
    """Multiplies the queries by the scores' factors for each head (a learned temperature), since a spec has only one scale.

    Before: scores = q @ k^T * temperature [heads, 1, 1]
    After:  q * (temperature / the largest temperature), and that one as the scale
    """
    graph, like = site.node.graph, value_of(site.query)
    factors = torch.tensor(by_head, dtype=like.dtype, device=device)[:, None, None]
    with graph.inserting_before(site.node):
        by = add_buffer(graph, f"query_factors_{layer_id}", factors)
        query = graph.call_function(aten.mul.Tensor, (site.query, by))
    by.meta["example_value"] = factors
    query.meta |= {"example_value": like, "nn_module_stack": site.node.meta.get("nn_module_stack")}
    return replace(site, query=query)
