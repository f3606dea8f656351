"""`torch.ops.paged_attn.dual_chunk_attention_with_output`: attention whose queries are rotated differently for each chunk distance.

It mutates only `output`. Keys and values go to the pool as in any attention. The backend attends three times: to the query's own chunk, to
the one before, and to everything before that. The results are merged by their log-sum-exps, which equals one softmax over all keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import ForwardMode
from paged_attn.attn_ops.context import ForwardContext, context_of
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.ops.define import define_op
from paged_attn.attn_ops.specs.dual_chunk import DualChunkSpec


def _run(query: Tensor, successive: Tensor, inter: Tensor, key: Tensor, value: Tensor, output: Tensor, layer_id: int) -> None:
    """Three queries [T, q_heads, qk_dim] per token, intra-chunk first; key [T, kv_heads, qk_dim], value [T, kv_heads, v_dim], any
    strides; output [T, q_heads, v_dim]. Rows past the batch's real tokens are zeroed."""
    context = context_of("dual_chunk_attention_with_output", query.shape[0])
    spec = context.layers[layer_id] if 0 <= layer_id < len(context.layers) else None
    if not isinstance(spec, DualChunkSpec):
        raise ContextError(f"layer {layer_id} of the pool has no dual chunk attention; allocate the pool with attention_layers(compiled)")
    queries = (query, successive, inter)[: _parts_seen(context, spec)]
    outputs = output.new_empty((len(queries), *output.shape))
    lse = torch.full((len(queries), *output.shape[:2]), -torch.inf, dtype=torch.float32, device=output.device)
    for index, each in enumerate(queries):
        context.backend.forward(
            context.plan, layer_id, spec.parts[index], each, key, value, outputs[index], save_kv_cache=index == 0, lse_out=lse[index]
        )
    # A part in which a query sees no key has weight exactly 0, so a row does not depend on how many parts its step has.
    weights = torch.softmax(lse, 0)[..., None]
    output.copy_(torch.where(weights > 0, outputs, 0).mul(weights).sum(0))


def _parts_seen(context: ForwardContext, spec: DualChunkSpec) -> int:
    """How many parts have keys that some query of this step sees. All for a decode step, whose captured graph must hold for any lengths."""
    assert spec.chunk is not None
    if context.batch.mode is ForwardMode.DECODE:
        return 3
    return min(3, max(1, -(-max(context.batch.seq_lens_host, default=0) // spec.chunk)))


DUAL_CHUNK_ATTENTION = define_op(
    "dual_chunk_attention_with_output(Tensor query, Tensor successive, Tensor inter, Tensor key, Tensor value, "
    "Tensor(a!) output, int layer_id) -> ()",
    _run,
)
