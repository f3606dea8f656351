"""Checks and times a pass over all layers; the result is a `Timing`, or the reason why there is none.

Functions are timed in turns (A B C A B C ...), so that a drifting clock favours none: CUDA graphs between events, or plain loops.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from paged_attn.attn_ops.errors import triton_errors
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.capabilities import GraphSupport, unmet
from paged_attn.backends.timing.inputs import Inputs

SAMPLE_MS = 4.0  # duration of a sample: long beside the microsecond or two between two graphs
ROUNDS = (5, 400)  # fewest and most samples per function
MOST_PASSES = 100  # calls of a function in one sample


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


@dataclass
class Turn:
    """What is sampled: `passes` calls of a function; `samples` are microseconds per pass."""

    function: Callable[[], object]  # kept alive, since a graph does not keep the memory that its kernels use
    run: Callable[[], object]
    passes: int
    milliseconds: float
    graphed: bool
    samples: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, function: Callable[[], object], device: torch.device, graphed: bool) -> Turn:
        """The function must have run before. With `graphed`, it is captured as a CUDA graph.

        Raises:
            RuntimeError: it cannot be captured.
        """
        once = _milliseconds(function, device)
        passes = max(1, min(MOST_PASSES, math.ceil(SAMPLE_MS / once)))

        def repeat() -> None:
            for _ in range(passes):
                function()

        if not graphed:
            return cls(function, repeat, passes, once * passes, graphed)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        try:
            with torch.cuda.graph(graph):
                repeat()
        finally:
            torch.cuda.set_stream(stream)  # a failed capture leaves its own stream current
        graph.replay()
        return cls(function, graph.replay, passes, _milliseconds(graph.replay, device), graphed)


def sample_in_turns(turns: Mapping[str, Turn], device: torch.device, min_ms: float) -> None:
    """Fills `samples` of each with about `min_ms` of samples; slow functions get fewer."""
    left = {name: max(ROUNDS[0], min(ROUNDS[1], math.ceil(min_ms / turn.milliseconds))) for name, turn in turns.items()}
    finish = []
    for done in range(max(left.values(), default=0)):
        finish += [_sample(turn, device) for name, turn in turns.items() if left[name] > done]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for turn, microseconds in finish:
        turn.samples.append(microseconds() / turn.passes)


def _sample(turn: Turn, device: torch.device) -> tuple[Turn, Callable[[], float]]:
    """Runs one sample; its time is read later, so that the GPU never waits for the host."""
    if device.type != "cuda":
        started = time.perf_counter()
        turn.run()
        elapsed = time.perf_counter() - started
        return turn, lambda: elapsed * 1e6
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    turn.run()
    events[1].record()
    return turn, lambda: events[0].elapsed_time(events[1]) * 1e3


def _milliseconds(function: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(1e-6, (time.perf_counter() - started) * 1e3)
