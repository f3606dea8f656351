"""A step while it is being put together."""

from __future__ import annotations

from dataclasses import dataclass

from paged_attn.engine.request import Request


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`count` tokens of a request from its first uncached one on; `samples` if they reach its last token."""

    request: Request
    count: int
    samples: bool


class StepPlan:
    """What a step will compute: `decodes` of one token, then `chunks`, each in order; `budget`: tokens that may still be added."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.decodes: list[Scheduled] = []
        self.chunks: dict[Request, int] = {}

    def add_decodes(self, decodes: list[Scheduled]) -> None:
        """As many as the budget allows."""
        self.decodes = decodes[: self.budget]
        self.budget -= len(self.decodes)

    def add_chunk(self, request: Request, count: int) -> None:
        self.chunks[request] = count
        self.budget -= count

    def cut_chunk(self, request: Request, end: int) -> None:
        """The chunk of a request, if it has one, goes no further than its first `end` tokens."""
        count = self.chunks.get(request, 0)
        cut = min(count, end - request.num_cached)
        if cut < count:
            self.chunks[request] = cut
            self.budget += count - cut

    def drop(self, request: Request) -> None:
        """A request is not computed after all."""
        if request in self.chunks:
            self.budget += self.chunks.pop(request)
        else:
            kept = [s for s in self.decodes if s.request is not request]
            self.budget += len(self.decodes) - len(kept)
            self.decodes = kept

    def scheduled(self) -> list[Scheduled]:
        chunks = [Scheduled(request, count, count == request.num_remaining) for request, count in self.chunks.items()]
        return self.decodes + chunks
