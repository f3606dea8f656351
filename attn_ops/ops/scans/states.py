"""Where an op with recurrent state finds it: the states of its layer and the rows of this step, from the thread's forward context."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from paged_attn.attn_ops.context import current_context
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.ops.scans.kernels import Kernel
from paged_attn.attn_ops.scans.state_rows import RecurrentPlan


def states_and_plan(op: str, rows: int, layer_id: int, state_id: int) -> tuple[Tensor, RecurrentPlan, Mapping[Callable[..., None], Kernel]]:
    """The states [slots, ...] of one layer, and the plan of the step, and what computes in the layer, for an op that was given so many
    rows.

    Raises:
        ContextError: no forward context, none with recurrent state, or another number of rows than the batch has.
    """
    context = current_context()
    if context is None or context.recurrent is None:
        where = "outside any forward context" if context is None else "in a forward context without recurrent state"
        raise ContextError(
            f"{op} of recurrent layer {layer_id} was called {where}; run the model through paged_attn.LLM, which keeps the state of "
            "every request"
        )
    if rows != context.batch.num_rows:
        raise ContextError(
            f"{op} of recurrent layer {layer_id} got {rows} rows but the forward context's batch has {context.batch.num_rows}; "
            "call the model with batch.model_inputs()"
        )
    plan: RecurrentPlan = context.recurrent_plan
    return context.recurrent.state(layer_id, state_id), plan, context.recurrent.kernels(layer_id)
