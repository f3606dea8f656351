"""Chooses how many threads PyTorch uses for a step on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from paged_attn.passes.fx.model_facts import model_device

SMALL = 100_000_000  # parameters of a small model
RETRY = 50  # another number is tried again when this many times its seconds were spent with the best one: 2 % at most are lost
LATEST = 0.4  # weight of the latest step in the moving average for the best thread count


class ThreadChoice:
    """As many threads as were fastest lately for steps of about as many rows, found by trying.

    The threads of an operation wait for each other, spinning, before the next operation starts. Where other programs run on the same cores,
    one thread is always late, and a step on all cores can take thirty times as long as on one. So nothing but time tells how many are best.

    Args:
        fixed: always so many; None chooses, from one to as many as PyTorch has when the step runs.
        first: what the first step runs with.

    A step may run in any thread: PyTorch's number is that of the thread, and it is what it was again after the step.
    """

    def __init__(self, fixed: int | None = None, first: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.fixed, self._first, self._clock = fixed, first, clock
        self._trials: dict[tuple[int, int], _Trials] = {}

    @contextmanager
    def for_step(self, rows: int) -> Iterator[None]:
        most = torch.get_num_threads()
        if self.fixed is not None or most == 1:
            with num_threads(self.fixed or most):
                yield
            return
        trials = self._trials_of(most, rows.bit_length())
        count = trials.next()
        started = self._clock()
        with num_threads(count):
            yield
        trials.add(count, self._clock() - started)

    def _trials_of(self, most: int, size: int) -> _Trials:
        """The trials of steps of a size; what is new starts from what is known of the nearest size."""
        if (most, size) not in self._trials:
            others = {abs(other - size): trials for (limit, other), trials in self._trials.items() if limit == most}
            self._trials[most, size] = others[min(others)].of_another_size() if others else _Trials(most, min(self._first or most, most))
        return self._trials[most, size]


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Inside, PyTorch computes with so many threads, in the thread that asks."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_threads_to_start(model: nn.Module) -> int:
    """For tracing and checking a model, whose operations on a few tokens are small: one, unless it is large or not on a CPU."""
    is_small = sum(parameter.numel() for parameter in model.parameters()) < SMALL
    return 1 if is_small and model_device(model).type == "cpu" else torch.get_num_threads()


class _Trials:
    """Seconds of steps of one size, by number of threads. Only half and twice the best number are tried: a step with far too few threads
    would take long, too."""

    def __init__(self, most: int, best: int) -> None:
        self.most, self.best = most, best
        self.seconds: dict[int, float] = {}
        self._since: dict[int, float] = {}  # seconds spent since a number was tried
        self._expected: dict[int, float] = {}  # seconds relative to the best count, for thread counts tried at another size

    def of_another_size(self) -> _Trials:
        found = _Trials(self.most, self.best)
        if self.best in self.seconds:
            found._expected = {count: seconds / self.seconds[self.best] for count, seconds in self.seconds.items()}
        return found

    def next(self) -> int:
        if self.best not in self.seconds:
            return self.best
        for count in (max(self.best // 2, 1), min(2 * self.best, self.most)):
            if count == self.best:
                continue
            if count not in self.seconds or self._since[count] > RETRY * self.seconds[count]:
                return count
        return self.best

    def add(self, count: int, seconds: float) -> None:
        if not self.seconds:
            self.seconds = {each: ratio * seconds for each, ratio in self._expected.items()}
            self._since = dict.fromkeys(self._expected, 0.0)
        before = self.seconds.get(count, seconds) if count == self.best else seconds
        self.seconds[count] = before + LATEST * (seconds - before)
        self._since = {each: spent + seconds for each, spent in self._since.items()} | {count: 0.0}
        self.best = min(self.seconds, key=self.seconds.__getitem__)
