"""Which tokens of which requests the next step computes: decodes first, then prefill chunks, then new requests."""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass

from paged_attn.engine.config import EngineConfig
from paged_attn.engine.kv_manager import KVManager
from paged_attn.engine.request import Request


@dataclass(frozen=True)
class Scheduled:
    """`count` tokens of a request from its first uncached one on; `samples` if they reach its last token."""

    request: Request
    count: int

    @property
    def samples(self) -> bool:
        return self.count == self.request.num_remaining


class Scheduler:
    """First come, first served, under a token budget per step (chunked prefill, mixed with decodes).

    When pages run out the newest running request is preempted: its pages go (its finished ones to the prefix cache), it waits at
    its old place, and is recomputed from prompt and output, so that its tokens stay the same.
    """

    def __init__(self, config: EngineConfig, kv: KVManager) -> None:
        self.config, self.kv = config, kv
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # by arrival
        self.num_preemptions = 0

    def schedule(self) -> list[Scheduled]:
        """The next step, in order of arrival with decodes first; pages are reserved."""
        chosen: dict[Request, int] = {}
        budget = self.config.max_batch_tokens
        decoding = [r for r in self.running if r.num_remaining == 1]
        prefilling = [r for r in self.running if r.num_remaining > 1]
        for request in decoding + prefilling:
            if budget == 0 or request not in self.running:  # an earlier one may have preempted it
                continue
            count = self._count(request, budget)
            if self._reserve_or_preempt(request, request.num_cached + count, chosen):
                chosen[request] = count
                budget = self.config.max_batch_tokens - sum(chosen.values())
        self._admit(chosen, budget)
        return [Scheduled(request, count) for request, count in chosen.items()]

    @staticmethod
    def _count(request: Request, budget: int) -> int:
        """As many tokens as there are left, as the budget allows, and as lie before the next point at which a state is to be kept."""
        count = min(request.num_remaining, budget)
        return min(count, request.snapshot_points[0] - request.num_cached) if request.snapshot_points else count

    def _reserve_or_preempt(self, request: Request, num_tokens: int, chosen: dict[Request, int]) -> bool:
        while not self.kv.reserve(request, num_tokens):
            newest = self.running[-1]
            self.preempt(newest)
            chosen.pop(newest, None)
            if newest is request:
                return False
        return True

    def _admit(self, chosen: dict[Request, int], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.config.max_requests and self.kv.can_admit:
            request = self.waiting[0]
            self.kv.adopt_prefix(request)
            needed = self.kv.allocator.pages_for(len(request.tokens)) - len(request.pages)
            count = self._count(request, budget)
            if needed > self.kv.num_available or not self.kv.reserve(request, request.num_cached + count):
                self.kv.release(request, share=False)
                return
            self.kv.take_state_slot(request)
            self.waiting.popleft()
            if not request.sampled:
                request.cached_tokens = request.num_cached
            bisect.insort(self.running, request, key=lambda r: r.arrival)
            chosen[request] = count
            budget -= count

    def preempt(self, request: Request) -> None:
        """Take a running request's pages and let it wait at its old place."""
        self.kv.release(request, share=bool(request.sampled))
        self.running.remove(request)
        position = bisect.bisect([r.arrival for r in self.waiting], request.arrival)
        self.waiting.insert(position, request)
        self.num_preemptions += 1

    def remove(self, request: Request, *, share: bool) -> None:
        """Forget a request, running or waiting, and free what it holds."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.kv.release(request, share=share)
