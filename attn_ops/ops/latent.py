"""`torch.ops.paged_attn.latent_attention_with_output`: attention whose keys and values are linear maps of one row per token.

It mutates only `output`. The row is stored in the pool. The output is computed in one of two ways (queries mapped to the latent, or keys
and values expanded), chosen in each step: see `paged_attn.backends.attention.latent`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paged_attn.attn_ops.context import context_of
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.ops.define import define_op
from paged_attn.attn_ops.specs.latent import LatentSpec


@dataclass(slots=True)
class LatentCall:
    """The op's arguments for one layer of one step.

    query [T, heads, key_dim + rotated], latent [T, rank], rotated [T, rotated] or None, any strides; output [T, heads, value_dim];
    weight_k and weight_v [rows, rank] of any strides, possibly one tensor: `spec.keys` and `spec.values` say which rows make K and V; None
    without these.
    """

    layer_id: int
    spec: LatentSpec
    query: Tensor
    latent: Tensor
    rotated: Tensor | None
    weight_k: Tensor | None
    weight_v: Tensor | None
    output: Tensor


def _run(
    query: Tensor,
    latent: Tensor,
    rotated: Tensor | None,
    weight_k: Tensor | None,
    weight_v: Tensor | None,
    output: Tensor,
    layer_id: int,
    bias: Tensor | None = None,
) -> None:
    """The tensors of a `LatentCall`; bias [heads, value_dim] is that of the values, which each row of the output gets once since a query's
    weights add up to 1. Rows past the batch's real tokens are zeroed, but for the bias."""
    context = context_of("latent_attention_with_output", query.shape[0])
    spec = context.layers[layer_id] if 0 <= layer_id < len(context.layers) else None
    width = latent.shape[1] + (0 if rotated is None else rotated.shape[1])
    if not isinstance(spec, LatentSpec) or (spec.rank, spec.qk_head_dim) != (latent.shape[1], width):
        raise ContextError(
            f"layer {layer_id} of the pool is not the model's, which keeps a row of {width} values a token; "
            "allocate the pool with attention_layers(compiled)"
        )
    call = LatentCall(layer_id, spec, query, latent, rotated, weight_k, weight_v, output)
    context.backend.forward_latent(context, call)
    if bias is not None:
        output.add_(bias)


LATENT_ATTENTION = define_op(
    "latent_attention_with_output(Tensor query, Tensor latent, Tensor? rotated, Tensor? weight_k, Tensor? weight_v, "
    "Tensor(a!) output, int layer_id, Tensor? bias=None) -> ()",
    _run,
)
