"""`torch.ops.paged_attn.rope_and_store_kv`: rotary embedding of query and key, and the store of K and V, in one pass over memory.

For passes that find the rotation in front of attention: the attention op then reads `query_out` and is called with save_kv_cache=False.
(RoPE: Su et al., 2021, https://arxiv.org/abs/2104.09864.)
"""

from __future__ import annotations

from torch import Tensor

from paged_attn.attn_ops.context import current_context
from paged_attn.attn_ops.define_op import define_op
from paged_attn.attn_ops.errors import ContextError


def _run(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, query_out: Tensor, layer_id: int, *, interleaved: bool = False
) -> None:
    """query, query_out [T, q_heads, dim], key [T, kv_heads, dim], value [T, kv_heads, v_dim], any strides; cos and sin [T, pairs].

    The first 2 * pairs elements of a head are rotated, by pairs (i, i + pairs) or, if interleaved, (2i, 2i + 1), in float32; the rest is
    copied. Rows of query_out past the batch's real tokens are zeroed. Only query_out and the pool are written.

    Raises:
        ContextError: no forward context, or shapes that do not fit each other, the batch or the layer.
    """
    context = current_context()
    if context is None:
        raise ContextError("rope_and_store_kv was called outside any forward context; wrap it in `with paged_attn.forward_context(...)`")
    if not 0 <= layer_id < len(context.layers):
        raise ContextError(f"layer {layer_id} is not in the pool, which has {len(context.layers)} layers; allocate the pool for this model")
    rows, spec = context.batch.num_rows, context.layers[layer_id]
    dim, v_dim = spec.qk_head_dim, spec.v_head_dim
    expected = {
        "query": (query, (rows, spec.num_q_heads, dim)),
        "key": (key, (rows, spec.num_kv_heads, dim)),
        "value": (value, (rows, spec.num_kv_heads, v_dim)),
        "query_out": (query_out, (rows, spec.num_q_heads, dim)),
        "sin": (sin, tuple(cos.shape)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ContextError(f"rope_and_store_kv, layer {layer_id}: {name} has shape {list(tensor.shape)}; it must be {list(shape)}")
    if cos.dim() != 2 or cos.shape[0] != rows or not 1 <= 2 * cos.shape[1] <= dim:
        raise ContextError(
            f"rope_and_store_kv, layer {layer_id}: cos has shape {list(cos.shape)}; "
            f"it must be [{rows}, pairs] with pairs from 1 to {dim // 2}"
        )
    context.backend.rope_and_store(context.plan, layer_id, query, key, value, cos, sin, query_out, interleaved)


ROPE_AND_STORE_KV = define_op(
    "rope_and_store_kv(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor(a!) query_out, int layer_id, *, "
    "bool interleaved=False) -> ()",
    _run,
)
