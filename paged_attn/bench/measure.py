"""Times one system on one workload."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paged_attn.bench.systems.job import Task
from paged_attn.bench.systems.systems import Stamps, System, Tokens, check_counts

WARM_UP_TOKENS = 16
PERCENTILES = (50, 90, 99)
Spread = dict[str, float]


@dataclass(frozen=True)
class Timed:
    """What one workload cost one system.

    Attributes:
        seconds: the median of `runs`, each from submitting all prompts to the last token.
        runs: wall seconds of each repetition, warm-up not among them.
        first_token, between_tokens: percentiles ("p50", "p90", "p99") over all requests, in seconds, of one more repetition, or of the
            last where stamps cost nothing: from submission to a request's first token, and from each of its tokens to the next. None if
            a run took longer than the limit; `between_tokens` also if there is one new token only.
        tokens: of the last run.
    """

    seconds: float
    runs: list[float]
    new_tokens: int
    first_token: Spread | None
    between_tokens: Spread | None
    tokens: Tokens

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


def measure(system: System, task: Task, repeat: int, max_seconds: float, who: str) -> Timed:
    """Warm up, time, and stamp once more. Raises RuntimeError: a run gave another number of tokens than was asked for."""
    new, runs, stamps = task.workload.new, [], None  # type: int, list[float], tuple[float, Stamps] | None
    tokens: Tokens = []
    _once(system, task, min(new, WARM_UP_TOKENS), who, stamped=False)
    while len(runs) < repeat and (not runs or sum(runs) + runs[-1] <= max_seconds):
        seconds, tokens, stamps = _once(system, task, new, who, stamped=system.stamps_are_free)
        runs.append(seconds)
    if stamps is None and runs[-1] <= max_seconds:
        _, tokens, stamps = _once(system, task, new, who, stamped=True)
    first, between = latencies(*stamps) if stamps is not None else (None, None)
    return Timed(statistics.median(runs), runs, task.workload.new_tokens, first, between, tokens)


def _once(system: System, task: Task, new: int, who: str, *, stamped: bool) -> tuple[float, Tokens, tuple[float, Stamps] | None]:
    with system.ready(task.prompts, new, stamped=stamped) as run:
        started = time.perf_counter()
        tokens, stamps = run()
        seconds = time.perf_counter() - started
    check_counts(tokens, new, who)
    return seconds, tokens, None if stamps is None else (started, stamps)


def latencies(started: float, stamps: Stamps) -> tuple[Spread, Spread | None]:
    """Percentiles of the time to the first token and of the times between tokens."""
    first = [row[0] - started for row in stamps]
    between = [after - before for row in stamps for before, after in itertools.pairwise(row)]
    return spread(first), spread(between) if between else None


def spread(values: Sequence[float]) -> Spread:
    """Percentiles by linear interpolation between the two nearest values."""
    return {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}
