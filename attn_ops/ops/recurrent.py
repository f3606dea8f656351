"""`torch.ops.paged_attn.recurrent_layer_with_output`: the one op that a captured graph calls for a layer with recurrent state.

It mutates `output` alone; the layer itself, its state and the batch come from the thread's forward context. The loop over tokens that
such a layer runs is so never part of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paged_attn.attn_ops.context import current_context
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.ops.define import define_op


def _run(inputs: Sequence[Tensor], output: Tensor, layer_id: int) -> None:
    """inputs: what the layer is given per token, each [1, T, ...]; output [1, T, ...]. Rows past the batch's real tokens are zeroed."""
    context = current_context()
    if context is None:
        raise ContextError(
            "recurrent_layer_with_output was called outside any forward context; run the model through paged_attn.LLM, which keeps "
            "the state of every request"
        )
    if context.recurrent is None:
        raise ContextError(
            f"the forward context has no recurrent state, but the model's recurrent layer {layer_id} needs it; "
            "run the model through paged_attn.LLM, which keeps the state of every request"
        )
    if output.shape[1] != context.batch.num_rows:
        raise ContextError(
            f"recurrent layer {layer_id} got {output.shape[1]} rows but the forward context's batch has {context.batch.num_rows}; "
            "call the model with batch.model_inputs()"
        )
    context.recurrent.forward(context.recurrent_plan, layer_id, inputs, output)


RECURRENT_LAYER = define_op("recurrent_layer_with_output(Tensor[] inputs, Tensor(a!) output, int layer_id) -> ()", _run)
