"""The waiting requests of one namespace and priority, and which is next: the policies "fcfs" and "lpm"."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Protocol

from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.ranked_queue import RankedQueue
from paged_attn.engine.requests.request import Request


class QueuePolicy(Protocol):
    """A queue of waiting requests. `next` gives the same request until the queue or the prefix cache changes."""

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """Add a request; called in order of arrival."""

    def next(self) -> Request:
        """The request whose turn it is; the queue is not empty."""

    def remove(self, request: Request, had_turn: bool = False) -> None:
        """Remove a request; `had_turn`: it is the one that `next` gave and was admitted or set aside."""


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
    """The longest cached prefix first, among the `WINDOW` oldest requests; the oldest of all is passed over at most `PATIENCE` times.

    So the request at position k of the queue has its turn after at most (PATIENCE + 1) * (k + 1) turns. `next` looks up at most `LOOKUPS`
    prefixes, and none if no pages were released or shared since the last time; for the rest of the window it uses earlier results.
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
        self._seen = -1  # `KVManager.version` at the last lookup
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
    """The constructor of a policy's queues; `policy` is a choice of `EngineConfig.policy`. Without a prefix cache all are "fcfs"."""
    makers: dict[str, Callable[[], QueuePolicy]] = {"fcfs": ArrivalOrder, "lpm": lambda: LongestPrefixFirst(kv)}
    return makers[policy] if kv.tree is not None else ArrivalOrder
