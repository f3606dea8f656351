"""What computes the ops in this room: the float32 truth in `scans/`, or what the layer has in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from paged_attn.attn_ops.scans.state_rows import RecurrentPlan

# Takes what the truth takes; False where it does not serve that, and has written nothing.
Kernel = Callable[..., bool]


def run_scan(
    extend: Callable[..., None], step: Callable[..., None], given: tuple[Any, ...], limits: tuple[float, ...], output: Tensor,
    states: Tensor, plan: RecurrentPlan, kernels: Mapping[Callable[..., None], Kernel],
) -> None:  # fmt: skip
    """Each call of the plan: `extend(*given, *limits, states, extends)`, then `step(*given, states, rows)`; padding becomes zero.

    `kernels`: what computes in place of these functions, where it serves what it is given.
    """
    for rows in plan.calls:
        if rows.extends is not None:
            _run(extend, kernels.get(extend), (*given, *limits, states, rows.extends))
        if rows.num_decode:
            _run(step, kernels.get(step), (*given, states, rows))
    output[plan.num_tokens :].zero_()


def _run(truth: Callable[..., None], kernel: Kernel | None, given: tuple[Any, ...]) -> None:
    if kernel is None or not kernel(*given):
        truth(*given)
