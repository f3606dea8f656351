"""What computes the ops in this room: the float32 truth in `scans/`, and on a GPU what was put in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from paged_attn.attn_ops.scans.state_rows import RecurrentPlan

# Takes what the truth takes; False where it does not serve that, and has written nothing.
Kernel = Callable[..., bool]
_on_gpu: dict[Callable[..., None], Kernel] = {}


def use_scan_kernel(truth: Callable[..., None], kernel: Kernel) -> None:
    """From now on `kernel` computes what lies on a GPU in place of `truth`, a function of `scans/`, where it serves it."""
    _on_gpu[truth] = kernel


def run_scan(
    extend: Callable[..., None], step: Callable[..., None], given: tuple[Any, ...], limits: tuple[float, ...], output: Tensor,
    states: Tensor, plan: RecurrentPlan,
) -> None:  # fmt: skip
    """Each call of the plan: `extend(*given, *limits, states, extends)`, then `step(*given, states, rows)`; padding becomes zero."""
    for rows in plan.calls:
        if rows.extends is not None:
            _run(extend, (*given, *limits, states, rows.extends), output)
        if rows.num_decode:
            _run(step, (*given, states, rows), output)
    output[plan.num_tokens :].zero_()


def _run(truth: Callable[..., None], given: tuple[Any, ...], output: Tensor) -> None:
    if output.is_cuda and (kernel := _on_gpu.get(truth)) is not None and kernel(*given):
        return
    truth(*given)
