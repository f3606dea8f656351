"""Times functions in turns (A B C A B C ...), so that a drifting clock favours none: CUDA graphs between events, or plain loops."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

SAMPLE_MS = 4.0  # duration of a sample: long beside the microsecond or two between two graphs
ROUNDS = (5, 400)  # fewest and most samples per function
MOST_PASSES = 100  # calls of a function in one sample


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
