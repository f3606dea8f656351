"""Checks and times a pass over all layers; the result is a `Timing`, or the reason why there is none."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paged_attn.attn_ops.errors import triton_errors
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.capabilities import GraphSupport, unmet
from paged_attn.backends.timing.clock import Turn, sample_in_turns
from paged_attn.backends.timing.inputs import Inputs


class WrongResultError(RuntimeError):
    """A backend is not timed because its results differ from the reference."""


@dataclass(frozen=True)
class Timing:
    """One layer of one step: the median of all samples, or an error.

    Attributes:
        microseconds: median; NaN with an error, like all other numbers.
        gbytes_per_s: KV, queries and output, read or written once, over the median.
        tflops: 2 * (qk_dim + v_dim) operations per query head and visible (query, key) pair, over the median.
        error: why there is no time, or None.
        min_microseconds: the fastest sample.
        spread: (90th - 10th percentile) / median.
        samples: how many.
        graphed: whether CUDA graphs were replayed; otherwise the time includes host work that the GPU waits for.
        relative_error: of the worst row in the check.
    """

    microseconds: float
    gbytes_per_s: float
    tflops: float
    error: str | None = None
    min_microseconds: float = float("nan")
    spread: float = float("nan")
    samples: int = 0
    graphed: bool = False
    relative_error: float = float("nan")

    @classmethod
    def failed(cls, error: str) -> Timing:
        return cls(float("nan"), float("nan"), float("nan"), error)

    @classmethod
    def of(cls, turn: Turn, layers: int, num_bytes: int, flops: int, error: float) -> Timing:
        ordered = sorted(sample / layers for sample in turn.samples)
        median, tenth = statistics.median(ordered), len(ordered) // 10
        spread = (ordered[-1 - tenth] - ordered[tenth]) / median
        speed = (num_bytes / median * 1e-3, flops / median * 1e-6)
        return cls(median, *speed, None, ordered[0], spread, len(ordered), turn.graphed, error)


def time_all(
    backends: Mapping[str, AttentionBackend],
    inputs: Inputs,
    prepare: Callable[[AttentionBackend], tuple[Callable[[], None], float]],
    min_ms: float,
    num_bytes: int,
    flops: int,
) -> dict[str, Timing]:
    """Prepares each backend, then samples in turns those that work. `prepare` checks one and returns (one pass over all layers, the error
    found); it raises if the backend must not be timed."""
    results: dict[str, Timing] = {}
    turns: dict[str, Turn] = {}
    errors: dict[str, float] = {}
    for name, backend in backends.items():
        if reasons := unmet(backend.capabilities, inputs.problem.layer_problem(inputs.device)):
            results[name] = Timing.failed("; ".join(reasons))
            continue
        try:
            one_pass, errors[name] = prepare(backend)
            # A backend that may be captured in one phase can replay any step that stays the same, as ours does.
            captured = any(support is not GraphSupport.NEVER for support in backend.capabilities.graphs.values())
            turns[name] = Turn.of(one_pass, inputs.device, inputs.device.type == "cuda" and captured)
        except failures() as error:
            results[name] = Timing.failed(f"{type(error).__name__}: {error}")
    sample_in_turns(turns, inputs.device, min_ms)
    results |= {name: Timing.of(turn, inputs.num_sets, num_bytes, flops, errors[name]) for name, turn in turns.items()}
    return {name: results[name] for name in backends}


def failures() -> tuple[type[BaseException], ...]:
    """Errors of backends that do not work: of Python, CUDA, compilers that they start, and Triton."""
    return (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ImportError, OSError,
            subprocess.SubprocessError, *triton_errors())  # fmt: skip
