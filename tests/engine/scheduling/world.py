"""A whole engine but for the model: every slot of the KV pool and every recurrent state knows of which prefix it is.

What `Engine.step` does is done here with the same scheduler and pages: steps overlap or not, some fail, some tokens are NaN, requests
come and are cancelled at any time. Each read of KV or state is checked.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paged_attn import EngineConfig
from paged_attn.engine.memory.budget import NO_STATE, StateSlots
from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.requests.request import Request
from paged_attn.engine.scheduling.scheduler import Scheduler
from tests.engine.memory.radix_invariants import check_invariants
from tests.engine.models import request_of
from tests.engine.scheduling.schedulers import Scheduled, each

POISON = 0  # who has this token gets NaN from it on
Part = tuple[Request, int, int, bool]


class FakeStates:
    """One recurrent state per slot; stands for a StatePool."""

    def __init__(self, num_slots: int) -> None:
        self.values: list[Any] = [None] * num_slots

    def copy(self, source: int, target: int) -> None:
        self.values[target] = self.values[source]


class World:
    """Steps a scheduler and checks what it does; `trace` has each step's requests and counts.

    Args:
        snapshots: that a recurrent model's prefix cache may keep; None for a model without states.
        slots: of state for them and for requests; None: for all of both.
        stops: one in so many tokens ends its request.
    """

    def __init__(
        self,
        rng: random.Random,
        num_pages: int,
        page_size: int,
        *,
        overlap: bool,
        snapshots: int | None = None,
        slots: int | None = None,
        stops: int = 9,
        **config: Any,
    ) -> None:
        self.rng, self.overlap, self.stops, self.page_size = rng, overlap, stops, page_size
        self.config = EngineConfig(page_size=page_size, **config)
        self.states: FakeStates | None = None
        state_slots = NO_STATE
        if snapshots is not None:
            total = self.config.max_requests + snapshots if slots is None else slots
            state_slots = StateSlots(1 + total, min(snapshots, total), rng.randrange(min(snapshots, total - 1) + 1))
            self.states = FakeStates(state_slots.total)
        self.kv = self.make_kv(num_pages, state_slots)
        if self.kv.states.allocator is not None:
            self.kv.states.allocator.free = self._forgetting(self.kv.states.allocator.free)  # type: ignore[method-assign]
        self.scheduler = Scheduler(self.config, self.kv)
        self.requests: dict[str, Request] = {}
        self.flights: deque[list[Part]] = deque()
        self.slots: dict[Any, int] = {}  # (page, offset) -> the prefix that it holds the KV of
        self.prefixes: dict[Request, list[int]] = {}  # of each request: of its first 1, 2, ... tokens, those under way included
        self.truth: dict[Request, list[int]] = {}
        self.trace: list[list[tuple[str, int, bool]]] = []
        self.bad: set[int] = set()  # prefixes with POISON
        self.computed = 0
        self.passed_over: tuple[Request | None, int] = (None, 0)  # who fits and waits, and how many steps in a row
        self._arrivals = 0

    def make_kv(self, num_pages: int, slots: StateSlots) -> KVManager:
        interval = self.config.snapshot_interval
        return KVManager(num_pages, self.page_size, self.config.prefix_cache, slots, self.states, interval)  # type: ignore[arg-type]

    def _forgetting(self, free: Callable[[int], None]) -> Callable[[int], None]:
        """A freed slot of state holds nothing."""

        def forget(slot: int) -> None:
            free(slot)
            assert self.states is not None
            self.states.values[slot] = None

        return forget

    def add(self, tokens: list[int], new: int, namespace: Any = None, priority: int = 0) -> Request:
        request = request_of(tokens, namespace)
        request.arrival, request.id = self._arrivals, f"r{self._arrivals}"
        request.max_new_tokens, request.priority = new, priority
        self._arrivals += 1
        self.requests[request.id] = request
        self.truth[request], self.prefixes[request] = [], []
        for token in tokens:
            self._know(request, token)
        self.scheduler.waiting.append(request)
        return request

    def finish(self, request: Request, share: bool) -> None:
        request.finish_reason = object()  # type: ignore[assignment]
        self.scheduler.remove(request, share=share)
        del self.requests[request.id]

    def cancel(self, request: Request) -> None:
        self.finish(request, share=bool(request.num_sampled))

    def step(self, fails: bool = False) -> None:
        """What Engine.step does; with `fails` the model raises."""
        if self.flights and self.scheduler.wants_drain:
            self._collect(0)
        launched = self._launch(fails)
        self.check()
        self._collect(1 if launched and self.overlap else 0)
        if not self.requests:
            self.flights.clear()
        self.check()

    def _launch(self, fails: bool) -> bool:
        self.step_made = self.scheduler.schedule(drained=not self.flights)
        scheduled = each(self.step_made)
        self.trace.append([(s.request.id, s.count, s.samples) for s in scheduled])
        if not scheduled:
            assert self.flights or not self.requests, "there is work, and nothing runs"
            return False
        self._check_step(scheduled)
        self._check_that_none_is_forgotten(scheduled)
        requests = [s.request for s in scheduled]
        checkpoints = self.kv.states.take_checkpoints(requests, [s.count for s in scheduled]) if self.states is not None else {}
        if fails:
            for kept in itertools.chain(*checkpoints.values()):
                self.states.values[kept.slot] = None  # type: ignore[union-attr]
            self._collect(0)
            for s in scheduled:
                if s.request.finish_reason is None and not self.kv.can_go_on(s.request):
                    if self.states is not None:
                        self.states.values[s.request.state_slot] = None
                    s.request.num_validated = 0
                    self.scheduler.preempt(s.request)
            return False
        for index, kept in checkpoints.items():
            for tokens, slot in kept:
                self.states.values[slot] = self.prefixes[requests[index]][requests[index].num_cached + tokens - 1]  # type: ignore[union-attr]
        self.flights.append([self._compute(s) for s in scheduled])
        self.kv.states.keep(requests)
        return True

    def _compute(self, scheduled: Scheduled) -> Part:
        request, start = scheduled.request, scheduled.request.num_cached
        end = start + scheduled.count
        self.computed += scheduled.count
        self._read(request, start)
        self._write(request, start, end)
        if self.states is not None:
            if start:
                assert self.states.values[request.state_slot] == self.prefixes[request][start - 1], f"{request.id} has another's state"
            self.states.values[request.state_slot] = self.prefixes[request][end - 1]
        request.num_cached = end
        if scheduled.samples:
            assert end == len(self.truth[request])
            request.num_tokens += 1
            self._know(request, 1 + self.prefixes[request][-1] % 3)
        return request, start, end, scheduled.samples

    def _read(self, request: Request, start: int) -> None:
        for position in range(start):
            assert self.slots[self._slot(request, position)] == self.prefixes[request][position], f"{request.id} reads another's KV"

    def _write(self, request: Request, start: int, end: int) -> None:
        for position in range(start, end):
            self.slots[self._slot(request, position)] = self.prefixes[request][position]

    def _collect(self, keep: int) -> None:
        while len(self.flights) > keep:
            for request, _, end, samples in self.flights.popleft():
                if samples and request.finish_reason is not None:
                    request.num_tokens -= 1
                elif samples:
                    request.num_validated = min(end, request.num_cached)
                    self._accept(request, end)

    def _accept(self, request: Request, end: int) -> None:
        if POISON in self.truth[request][:end]:
            request.num_tokens -= 1
            self.finish(request, share=False)
            return
        if not request.num_sampled or request.snapshots:
            self.kv.share(request)
        token = self.truth[request][end]
        request.tokens.append(token)
        if request.num_sampled == request.max_new_tokens or self.prefixes[request][end] % self.stops == 0:
            self.finish(request, share=True)

    def _know(self, request: Request, token: int) -> None:
        self.truth[request].append(token)
        before = self.prefixes[request][-1] if self.prefixes[request] else hash((request.namespace is None, request.namespace == "a"))
        self.prefixes[request].append(hash((before, token)))
        if token == POISON or before in self.bad:
            self.bad.add(self.prefixes[request][-1])

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        return request.pages[position // self.page_size], position % self.page_size

    def _check_step(self, scheduled: Sequence[Scheduled]) -> None:
        scheduler, chosen = self.scheduler, [s.request for s in scheduled]
        assert len(set(chosen)) == len(chosen) <= len(scheduler.running) <= self.config.max_requests
        assert all(request in scheduler.running for request in chosen)
        assert sum(s.count for s in scheduled) <= self.config.step_tokens and all(s.count > 0 for s in scheduled)
        for s in scheduled:
            assert len(s.request.pages) * self.page_size >= s.request.num_cached + s.count
            assert s.samples == (s.count == s.request.num_remaining)
            assert s.request.num_tokens - s.request.num_prompt < s.request.max_new_tokens

    def _check_that_none_is_forgotten(self, scheduled: Sequence[Scheduled]) -> None:
        """Whose turn it is does not fit, or has not for long. (With a prefix cache only adopting would tell.)"""
        scheduler = self.scheduler
        is_full = len(scheduler.running) >= self.config.max_requests or sum(s.count for s in scheduled) >= self.config.step_tokens
        if not self.config.prefix_cache and scheduler.waiting.urgency is not None and not scheduler.wants_drain and not is_full:
            request = scheduler.waiting.next()
            assert request is not None
            fits = self.kv.states.can_admit and self.kv.shortfall(request) <= 0
            self.passed_over = (request, self.passed_over[1] + 1) if fits and self.passed_over[0] is request else (request, int(fits))
            assert self.passed_over[1] <= (self.page_size if self.kv.frees_as_it_runs else 0), f"{request.id} fits, and waits"

    def check(self) -> None:
        """Every page and slot has one owner, and every request one place."""
        scheduler, kv = self.scheduler, self.kv
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        assert {r.id for r in (*running, *waiting)} == set(self.requests) and len(running) + len(waiting) == len(self.requests)
        assert len(scheduler.running) == len(running) and len(scheduler.waiting) == len(waiting)
        assert running == sorted(running, key=lambda r: (r.priority, r.arrival))
        assert not any(r.pages or r.lock or r.state_slot or r.snapshots or r.taken_slots for r in waiting)
        owned = [page for r in running for page in r.pages[r.num_locked // self.page_size :]]
        cached = kv.tree.num_pages if kv.tree else 0
        assert len(set(owned)) == len(owned)
        self.check_pages(len(owned) + cached)
        if kv.tree is not None:
            check_invariants(kv.tree)
            assert not any(self.slots[slot] in self.bad for slot in self.slots_of(kv.tree._owned)), "NaN is in the prefix cache"
            assert kv.tree.locked_pages == len({page for r in running for page in r.pages[: r.num_locked // self.page_size]})
        if kv.states.allocator is not None:
            taken = [slot for r in running for slot in (*r.snapshots.values(), *r.taken_slots.values())]
            kept = [] if kv.tree is None else [node.payload for node, _ in kv.tree.nodes() if node.payload is not None]
            owned = [*taken, *kept, *(r.state_slot for r in running)]
            assert len(set(owned)) == len(owned) and set(owned) == kv.states.allocator._held, "a slot has one owner"
            assert kv.states.num_in_use == len(taken) + len(running)
            if kv.states.snapshots is not None:
                assert set(taken) == kv.states.snapshots.taken and kv.states.num_snapshots == len(kept)
        for request in running:
            assert all(self.kv.allocator.is_allocated(page) for page in request.pages)

    def check_pages(self, num_held: int) -> None:
        assert self.kv.allocator.num_free + num_held == self.kv.num_usable

    def slots_of(self, pages: Iterable[int]) -> list[Any]:
        return [(page, offset) for page in pages for offset in range(self.page_size)]

    def check_empty(self) -> None:
        """Nothing is left of anybody."""
        assert not self.requests and not self.scheduler.running and not self.scheduler.waiting
        self.check()
        prefills = self.scheduler._prefills
        assert not any((prefills._holders, prefills._prefixes, prefills._held, prefills._waits_for, prefills._times))
        queue = self.scheduler.waiting
        assert not any((queue._since, queue._aside, queue._classes, queue._priorities))
        if self.kv.tree is not None:
            assert self.kv.tree.locked_pages == 0
            self.kv.tree.clear()
        assert self.kv.allocator.num_free == self.kv.num_usable
        assert self.kv.states.allocator is None or not self.kv.states.allocator.num_held
