"""A step while it is being planned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged_attn.engine.requests.request import NO_SCORES, Request


@dataclass(frozen=True, eq=False)
class ScheduledStep:
    """What a step computes, in columns: creating an object for each request would take longer than everything else done with it.

    Attributes:
        requests: in the order of the step.
        counts: [requests] int64, how many tokens of each request, starting at its first uncached token.
        samples: [requests] bool, whether these include its last token.
    """

    requests: list[Request]
    counts: NDArray[np.int64]
    samples: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.requests)


class StepPlan:
    """What a step will compute: `decodes` of one token, then `chunks`, each in order. `budget`: how many tokens may still be added;
    `score_budget`: how many of them may be tokens of scored prompts."""

    def __init__(self, budget: int, score_budget: int = NO_SCORES) -> None:
        self.budget, self.score_budget = budget, score_budget
        self.decodes: list[Request] = []
        self.chunks: dict[Request, int] = {}

    def add_decodes(self, requests: list[Request]) -> None:
        """Add as many as the budget allows."""
        self.decodes = requests[: self.budget]
        self.budget -= len(self.decodes)

    def add_chunk(self, request: Request, count: int) -> None:
        self.chunks[request] = count
        self._spend(request, 0, count)

    def drop(self, request: Request) -> None:
        """Take a request out of the step again."""
        if request in self.chunks:
            self._spend(request, self.chunks.pop(request), 0)
        elif request in self.decodes:
            self.budget += 1
            self.decodes.remove(request)

    def _spend(self, request: Request, before: int, now: int) -> None:
        """Charge the budgets for a chunk of `now` tokens instead of `before`."""
        kept = max(request.scores_from - request.num_cached, 0)  # tokens whose logits are known or not wanted
        self.budget -= now - before
        self.score_budget -= max(now - kept, 0) - max(before - kept, 0)

    def scheduled(self) -> ScheduledStep:
        requests, first_chunk = [*self.decodes, *self.chunks], len(self.decodes)
        counts, samples = np.ones(len(requests), np.int64), np.ones(len(requests), np.bool_)
        if self.chunks:
            counts[first_chunk:] = list(self.chunks.values())
            samples[first_chunk:] = [count == request.num_remaining for request, count in self.chunks.items()]
        return ScheduledStep(requests, counts, samples)
