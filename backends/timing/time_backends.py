"""Time attention backends side by side: the same inputs, each checked first, in turns, as CUDA graphs.

    problem = TimedProblem("decode", ((4095, 1),) * 64)
    time_backends({"triton": TritonBackend(), "fa3": FA3Backend()}, problem)["triton"].microseconds

The inputs of a problem are several layers of one page-major pool, each with its own queries, so that together their KV exceeds the L2 cache
several times; one pass runs them all, as the layers of a model would run. A time is that of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paged_attn.attn_ops.current_device import current_device
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.devices import default_device
from paged_attn.backends.timing.inputs import Inputs
from paged_attn.backends.timing.problem import TimedProblem
from paged_attn.backends.timing.reference import relative_error, row_attention
from paged_attn.backends.timing.run import Timing, WrongResultError, time_all

__all__ = ["TimedProblem", "Timing", "time_backends"]

# Largest error of a row, relative to the row: what rounding inputs and probabilities to the dtype explains.
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def time_backends(
    backends: Mapping[str, AttentionBackend],
    problem: TimedProblem,
    *,
    min_ms: float = 100,
    in_graph_plan: bool = False,
    with_write: bool = False,
    device: torch.device | str | None = None,
) -> dict[str, Timing]:
    """A timing for each backend, in the order given; one that does not fit, fails, or gives wrong numbers gets an error instead.

    Args:
        min_ms: about how long each backend is sampled.
        in_graph_plan: time `plan_in_graph` as well, once per pass over all layers; else it runs once, before.
        with_write: store K and V of the new tokens in the pool as well; else they are there already.
        device: the GPU if there is one. Off the GPU there are no graphs, and times are those of a plain loop.
    """
    inputs = Inputs.make(problem, default_device() if device is None else device)
    with current_device(inputs.device):
        inputs.store_new()
        expected = {layer: row_attention(inputs, layer) for layer in inputs.checked_layers}

        def prepare(backend: AttentionBackend) -> tuple[Callable[[], None], float]:
            plan = backend.plan(inputs.batch, inputs.pool)
            backend.plan_in_graph(plan)

            def one_pass() -> None:
                if in_graph_plan:
                    backend.plan_in_graph(plan)
                for layer, spec in enumerate(inputs.pool.layers):
                    operands = (inputs.query[layer], inputs.key[layer], inputs.value[layer], inputs.output[layer])
                    backend.forward(plan, layer, spec, *operands, save_kv_cache=with_write, sinks=inputs.sinks)

            if with_write:
                inputs.poison_new()
            inputs.output.fill_(float("nan"))
            one_pass()
            wrong = inputs.num_wrong()
            inputs.store_new()  # also after a backend that spoilt them
            return one_pass, _checked(inputs, expected, wrong)

        return time_all(backends, inputs, prepare, min_ms, problem.bytes_moved(with_write), problem.flops)


def _checked(inputs: Inputs, expected: Mapping[int, Tensor], wrong_slots: int) -> float:
    if wrong_slots:
        raise WrongResultError(f"K or V of new tokens is not in the pool in {wrong_slots} places")
    found = {layer: relative_error(inputs.output[layer], rows) for layer, rows in expected.items()}
    tolerance = TOLERANCES[inputs.problem.dtype]
    for layer, error in found.items():
        if not error <= tolerance:  # NaN is wrong, too
            raise WrongResultError(
                f"relative error {error:.3g} in layer {layer} against the float32 reference; allowed is {tolerance:g}, so it was not timed"
            )
    return max(found.values())
