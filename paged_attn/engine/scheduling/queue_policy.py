"""The waiting requests of one namespace and priority, and which is next: the policies "fcfs" and "lpm"."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Protocol

from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.ranked_queue import RankedQueue
from paged_attn.engine.requests.request import Request


class QueuePolicy(Protocol):
    """Requests that wait for each other. What is `next` stays so until the queue or the prefix cache changes."""

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """Add a request, in the order of arrivals."""

    def next(self) -> Request:
        """Whose turn it is, in a queue that is not empty."""

    def remove(self, request: Request, had_turn: bool = False) -> None:
        """Forget a request: the one that `next` gave, which had its turn, or one that left otherwise."""


class ArrivalOrder(RankedQueue[Request]):
    """First come, first served."""

    def push(self, request: Request) -> None:
        self.put(request, request.arrival)

    def next(self) -> Request:
        request = self.first()
        assert request is not None
        return request

    def remove(self, request: Request, had_turn: bool = False) -> None:
        self.discard(request)


class LongestPrefixFirst:
    """Longest cached prefix first, among the `WINDOW` that came first; who came first of all is passed over `PATIENCE` times at most.

    So the request at position k of the queue has its turn after (PATIENCE + 1) * (k + 1) turns at most. `next` looks up `LOOKUPS` prefixes
    at most, and none if pages did not change hands since the last time; for the others of the window it goes by what it knew.
    """

    WINDOW = 64
    PATIENCE = 64
    LOOKUPS = 16

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._rest = ArrivalOrder()
        self._window: list[Request] = []  # by arrival
        self._cached: dict[Request, int] = {}  # tokens of those in the window, as far as known
        self._passed = 0  # how often the first of the window was passed over
        self._cursor = 0  # index into the window: whose prefix is looked up next
        self._seen = -1  # the version of the pages at the last look
        self._choice: Request | None = None

    def __len__(self) -> int:
        return len(self._window) + len(self._rest)

    def push(self, request: Request) -> None:
        self._choice = None
        if not self._window or request.arrival > self._window[-1].arrival:
            self._rest.push(request)
            return
        bisect.insort(self._window, request, key=lambda r: r.arrival)
        if len(self._window) > self.WINDOW:
            last = self._window.pop()
            self._cached.pop(last, None)
            self._rest.push(last)

    def remove(self, request: Request, had_turn: bool = False) -> None:
        self._passed += had_turn  # 0 again below if it was the first
        if request in self._rest:
            self._rest.remove(request)
            return
        self._choice = None
        position = self._window.index(request)
        if position == 0:
            self._passed = 0
        del self._window[position]
        self._cached.pop(request, None)

    def next(self) -> Request:
        if self._choice is not None and self._seen == self._kv.version:
            return self._choice
        while self._rest and len(self._window) < self.WINDOW:
            request = self._rest.next()
            self._rest.remove(request)
            self._window.append(request)
        self._look_up()
        if self._passed >= self.PATIENCE:
            self._choice = self._window[0]
        else:
            self._choice = max(self._window, key=lambda r: self._cached.get(r, 0))  # the first one of equals
        return self._choice

    def _look_up(self) -> None:
        fresh = [request for request in self._window if request not in self._cached][: self.LOOKUPS]
        again = min(self.LOOKUPS - len(fresh), len(self._window)) if self._seen != self._kv.version else 0
        for request in fresh:
            self._cached[request] = self._kv.cached_tokens(request)
        for _ in range(again):
            self._cursor = (self._cursor + 1) % len(self._window)
            request = self._window[self._cursor]
            self._cached[request] = self._kv.cached_tokens(request)
        self._seen = self._kv.version


def policy_maker(policy: str, kv: KVManager) -> Callable[[], QueuePolicy]:
    """What makes the queues of a policy, one of the choices of `EngineConfig.policy`. Without a prefix cache all policies are "fcfs"."""
    makers: dict[str, Callable[[], QueuePolicy]] = {"fcfs": ArrivalOrder, "lpm": lambda: LongestPrefixFirst(kv)}
    return makers[policy] if kv.tree is not None else ArrivalOrder
