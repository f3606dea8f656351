"""`torch.ops.paged_attn.recurrent_layer_with_output`: the one op that a captured graph calls for a layer with recurrent state.

It mutates only `output`; the layer itself, its state and the batch come from the thread's forward context. So the loop over tokens that
such a layer runs is never part of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paged_attn.attn_ops.context import recurrent_context_of
from paged_attn.attn_ops.ops.define import define_op


def _run(inputs: Sequence[Tensor], output: Tensor, layer_id: int) -> None:
    """inputs: the layer's arguments per token, each [1, T, ...]; output [1, T, ...]. Rows past the batch's real tokens are zeroed."""
    context, recurrent = recurrent_context_of("recurrent_layer_with_output", layer_id, output.shape[1])
    recurrent.forward(context.recurrent_plan, layer_id, inputs, output)


RECURRENT_LAYER = define_op("recurrent_layer_with_output(Tensor[] inputs, Tensor(a!) output, int layer_id) -> ()", _run)
