"""`torch.ops.paged_attn.unified_attention_with_output`: the one op that a rewritten graph calls for attention.

It mutates only `output` (and `lse_out` if given); pools, batch and plan come from the thread's forward context and are
never graph inputs, because a pool that is a graph input is copied by functionalisation or breaks CUDA graphs.
"""

from __future__ import annotations

from torch import Tensor

from paged_attn.attn_ops.context import context_of
from paged_attn.attn_ops.errors import ContextError, UnsupportedError
from paged_attn.attn_ops.ops.define import define_op


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    layer_id: int,
    save_kv_cache: bool,
    *,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    positions: Tensor | None = None,
    lse_out: Tensor | None = None,
) -> None:
    """query [T, q_heads, qk_dim], key [T, kv_heads, qk_dim], value [T, kv_heads, v_dim], any strides; output [T, q_heads, v_dim].

    sinks [q_heads]; bias [q_heads, N], see `AttentionSpec.bias_index`.
    Rows past the batch's real tokens are zeroed. lse_out [T, q_heads] float32: log-sum-exp of the scores.
    """
    context = context_of("unified_attention_with_output", query.shape[0])
    if q_rope is not None or k_rope is not None or positions is not None:
        raise UnsupportedError("q_rope, k_rope and positions are reserved for fused rotary embedding; no backend takes them yet")
    if not 0 <= layer_id < len(context.layers):
        raise ContextError(f"layer {layer_id} is not in the pool, which has {len(context.layers)} layers; allocate the pool for this model")
    context.backend.forward(
        context.plan, layer_id, context.layers[layer_id], query, key, value, output,
        save_kv_cache=save_kv_cache, sinks=sinks, bias=bias, lse_out=lse_out,
    )  # fmt: skip


UNIFIED_ATTENTION = define_op(
    "unified_attention_with_output(Tensor query, Tensor key, Tensor value, Tensor(a!) output, int layer_id, bool save_kv_cache, *, "
    "Tensor? sinks=None, Tensor? bias=None, "
    "Tensor? q_rope=None, Tensor? k_rope=None, Tensor? positions=None, Tensor(b!)? lse_out=None) -> ()",
    _run,
)
