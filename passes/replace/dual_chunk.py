"""Replaces an attention with three queries per token by the op that attends to its chunks.

Before: out [1, Hq, T, Dv] of q0, q1, q2 [1, Hq, T, D], repeated k, repeated v, however the graph computes it
After:  o = aten.new_empty(q0', [T, Hq, Dv]); dual_chunk_attention_with_output(q0', q1', q2', k', v', o, layer_id); out = o^T[None], with
        the intra-chunk query first. Products, masks and merges are dead code afterwards.
"""

from __future__ import annotations

import torch
from torch import fx

from paged_attn.attn_ops.ops.dual_chunk import DUAL_CHUNK_ATTENTION
from paged_attn.attn_ops.specs.dual_chunk import DualChunkSpec
from paged_attn.passes.find.attention_site import AttentionSite
from paged_attn.passes.fx.graph_tools import shape_of
from paged_attn.passes.prove.dual_chunk import DualChunkProof
from paged_attn.passes.replace.attention import operand, tokens_and_output, use_output
from paged_attn.passes.replace.kv_heads import KVSource, as_received


def replace_dual_chunk(
    site: AttentionSite, queries: list[fx.Node], key: KVSource, value: KVSource, proof: DualChunkProof, layer_id: int, dtype: torch.dtype
) -> tuple[DualChunkSpec, fx.Node, fx.Node]:
    """Replaces one site in place; returns the spec, the op's node, and the node that replaces the old output.

    Args:
        queries: [1, q_heads, T, dim], in the site's order.
        dtype: the pool's.
    """
    graph, (_, heads, _, width) = site.node.graph, shape_of(queries[0])
    spec = DualChunkSpec(
        num_q_heads=int(heads), num_kv_heads=key.num_heads, qk_head_dim=int(width), v_head_dim=int(shape_of(site.value)[3]),
        scale=proof.scale, chunk=proof.chunk, kv_layer=layer_id, module=site.module,
    )  # fmt: skip
    with graph.inserting_before(site.node):
        sources = (*(as_received(queries[place], spec.num_q_heads) for place in proof.order), key, value)
        operands = [operand(each, dtype) for each in sources]
        _, output = tokens_and_output(operands[0], spec.num_q_heads, spec.v_head_dim)
        op = graph.call_function(DUAL_CHUNK_ATTENTION, (*operands, output, layer_id))
    return spec, op, use_output(site, output, [*operands, op], dtype)
