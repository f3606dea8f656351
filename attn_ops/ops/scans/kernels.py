"""How the ops in this room run: on the states of their layer and the rows of this step, both from the thread's forward context, by the
float32 truth in `scans/`, or what the layer has in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from paged_attn.attn_ops.context import recurrent_context_of
from paged_attn.attn_ops.scans.state_rows import RecurrentPlan

# Takes what the truth takes; False where it does not serve that, and has written nothing.
Kernel = Callable[..., bool]


def run_scan(
    op: str, layer_id: int, state_id: int, extend: Callable[..., None], step: Callable[..., None], given: tuple[Any, ...], output: Tensor,
    limits: tuple[float, ...] = (),
) -> None:  # fmt: skip
    """Each call of the plan: `extend(*given, *limits, states, extends)`, then `step(*given, states, rows)`; padding becomes zero.

    Raises:
        ContextError: no forward context, none with recurrent state, or another number of rows than the batch has.
    """
    context, recurrent = recurrent_context_of(op, layer_id, output.shape[0])
    plan: RecurrentPlan = context.recurrent_plan
    states, kernels = recurrent.state(layer_id, state_id), recurrent.kernels(layer_id)
    for rows in plan.calls:
        if rows.extends is not None:
            _run(extend, kernels.get(extend), (*given, *limits, states, rows.extends))
        if rows.num_decode:
            _run(step, kernels.get(step), (*given, states, rows))
    output[plan.num_tokens :].zero_()


def _run(truth: Callable[..., None], kernel: Kernel | None, given: tuple[Any, ...]) -> None:
    if kernel is None or not kernel(*given):
        truth(*given)
