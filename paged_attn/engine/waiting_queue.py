"""All requests that wait: the most urgent priority first, in it those that ran before, then one of each namespace in turn."""

from __future__ import annotations

import bisect
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

from paged_attn.engine.request import Request
from paged_attn.engine.waiting_lines import ArrivalLine, Line


class PriorityClass:
    """Those of one priority. Preempted ones are few, have come first once, and come first again, by arrival."""

    def __init__(self, make_line: Callable[[], Line]) -> None:
        self._make_line = make_line
        self.preempted = ArrivalLine()
        self.turns: OrderedDict[Hashable, Line] = OrderedDict()  # by namespace; whose turn it is first

    def __bool__(self) -> bool:
        return bool(self.turns) or bool(self.preempted)

    def push(self, request: Request) -> None:
        if request.namespace not in self.turns:
            self.turns[request.namespace] = self._make_line()
        self.turns[request.namespace].push(request)

    def next(self) -> Request:
        return self.preempted.next() if self.preempted else next(iter(self.turns.values())).next()

    def take(self, request: Request) -> None:
        """Remove who is `next`; then it is the next namespace's turn."""
        if request in self.preempted:
            self.preempted.take(request)
        else:
            self.turns[request.namespace].take(request)
            self.turns.move_to_end(request.namespace)
            self._drop_empty(request.namespace)

    def remove(self, request: Request) -> None:
        if request in self.preempted:
            self.preempted.remove(request)
        else:
            self.turns[request.namespace].remove(request)
            self._drop_empty(request.namespace)

    def _drop_empty(self, namespace: Hashable) -> None:
        if not self.turns[namespace]:
            del self.turns[namespace]


class WaitingQueue:
    """Requests in the order in which they are to be admitted. No operation but iterating depends on how many there are, or only by
    its logarithm.

    Iterating gives them by priority and arrival, which need not be the order of admission.
    """

    def __init__(self, make_line: Callable[[], Line]) -> None:
        self._make_line = make_line
        self._since: dict[Request, float | None] = {}  # None: it ran before
        self._aside: set[Request] = set()
        self._classes: dict[int, PriorityClass] = {}
        self._priorities: list[int] = []  # of classes that hold requests, the most urgent first

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, request: Request) -> bool:
        return request in self._since

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._since, key=lambda r: (r.priority, r.arrival)))

    @property
    def urgency(self) -> int | None:
        """The priority of `next`; None if nobody can be next."""
        return self._priorities[0] if self._priorities else None

    def append(self, request: Request) -> None:
        """Add a new request."""
        self._since[request] = time.perf_counter()
        self._enter(request)

    def append_preempted(self, request: Request) -> None:
        """Add a request that ran: it goes before all others of its priority that did not."""
        self._since[request] = None
        self._enter(request)

    def next(self) -> Request | None:
        """Who is to be admitted next; None if nobody waits, or only requests that were set aside."""
        return self._classes[self._priorities[0]].next() if self._priorities else None

    def take(self, request: Request) -> float | None:
        """Remove who is `next`; returns the seconds that it waited, None if it ran before."""
        self._leave(request, had_turn=True)
        since = self._since.pop(request)
        return None if since is None else time.perf_counter() - since

    def set_aside(self, request: Request) -> None:
        """Who is `next` shall wait for something else, until `bring_back`."""
        self._leave(request, had_turn=True)
        self._aside.add(request)

    def bring_back(self, request: Request) -> None:
        """A request that was set aside takes its place by arrival again."""
        self._aside.remove(request)
        self._enter(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it waits."""
        del self._since[request]
        if request in self._aside:
            self._aside.remove(request)
        else:
            self._leave(request, had_turn=False)

    def _enter(self, request: Request) -> None:
        if request.priority not in self._classes:
            self._classes[request.priority] = PriorityClass(self._make_line)
            bisect.insort(self._priorities, request.priority)
        of_priority = self._classes[request.priority]
        if self._since[request] is None:
            of_priority.preempted.push(request)
        else:
            of_priority.push(request)

    def _leave(self, request: Request, had_turn: bool) -> None:
        of_priority = self._classes[request.priority]
        if had_turn:
            of_priority.take(request)
        else:
            of_priority.remove(request)
        if not of_priority:
            del self._classes[request.priority]
            self._priorities.remove(request.priority)
