"""All waiting requests: the most urgent priority first; within it preempted requests, then tenants in turn."""

from __future__ import annotations

import bisect
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator

from paged_attn.engine.requests.request import Request
from paged_attn.engine.scheduling.queue_policy import ArrivalOrder, QueuePolicy


class RoundRobin:
    """A queue made of one queue for each key, which take turns. These may be `RoundRobin` as well.

    Args:
        key: of the queue to which a request belongs.
        make_policy: makes the queue of a key; empty queues are dropped.
    """

    def __init__(self, key: Callable[[Request], Hashable], make_policy: Callable[[], QueuePolicy]) -> None:
        self._key, self._make_policy = key, make_policy
        self._queues: OrderedDict[Hashable, QueuePolicy] = OrderedDict()  # the next one in turn comes first

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def push(self, request: Request) -> None:
        key = self._key(request)
        if key not in self._queues:
            self._queues[key] = self._make_policy()
        self._queues[key].push(request)

    def next(self) -> Request:
        return next(iter(self._queues.values())).next()

    def remove(self, request: Request, had_turn: bool = False) -> None:
        """Remove a request; if it had its turn, the next key's turn comes."""
        key = self._key(request)
        self._queues[key].remove(request, had_turn)
        if had_turn:
            self._queues.move_to_end(key)
        if not self._queues[key]:
            del self._queues[key]


class PriorityClass:
    """Waiting requests of one priority. Preempted ones are few, have come first once, and come first again, by arrival."""

    def __init__(self, make_policy: Callable[[], QueuePolicy]) -> None:
        self.preempted = ArrivalOrder()
        self.round_robin = RoundRobin(lambda r: r.tenant, lambda: RoundRobin(lambda r: r.namespace, make_policy))

    def __bool__(self) -> bool:
        return bool(self.round_robin) or bool(self.preempted)

    def next(self) -> Request:
        return self.preempted.next() if self.preempted else self.round_robin.next()

    def remove(self, request: Request, had_turn: bool) -> None:
        """Forget a request; if it had its turn as `next`, it is the next tenant's turn."""
        (self.preempted if request in self.preempted else self.round_robin).remove(request, had_turn)


class WaitingQueue:
    """Requests in the order in which they are to be admitted. No operation but iterating depends on how many there are, or only by
    its logarithm.

    Iterating gives them by priority and arrival, which need not be the order of admission.

    Attributes:
        count_of: how many of each tenant wait.
    """

    def __init__(self, make_policy: Callable[[], QueuePolicy]) -> None:
        self.count_of: Counter[Hashable] = Counter()
        self._make_policy = make_policy
        self._since: dict[Request, float | None] = {}  # None: it ran before
        self._aside: set[Request] = set()
        self._classes: dict[int, PriorityClass] = {}
        self._priorities: list[int] = []  # priorities with waiting requests, the most urgent first

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, request: Request) -> bool:
        return request in self._since

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._since, key=lambda r: (r.priority, r.arrival)))

    def is_new(self, request: Request) -> bool:
        """Whether it is waiting and has not run yet."""
        return self._since.get(request) is not None

    @property
    def urgency(self) -> int | None:
        """The priority of `next`; None if there is none."""
        return self._priorities[0] if self._priorities else None

    def append(self, request: Request, *, ran_before: bool = False) -> None:
        """Add a request; one that ran before is put before all requests of its priority that did not."""
        self._since[request] = None if ran_before else time.perf_counter()
        self.count_of[request.tenant] += 1
        self._enter(request)

    def next(self) -> Request | None:
        """The request to admit next; None if none is waiting, except requests that were set aside."""
        return self._classes[self._priorities[0]].next() if self._priorities else None

    def take(self, request: Request) -> float | None:
        """Remove the request that is `next`; returns the seconds that it waited, None if it ran before."""
        self._leave(request, had_turn=True)
        since = self._forget(request)
        return None if since is None else time.perf_counter() - since

    def set_aside(self, request: Request) -> None:
        """Skip the request that is `next` until `bring_back`."""
        self._leave(request, had_turn=True)
        self._aside.add(request)

    def bring_back(self, request: Request) -> None:
        """Queue a request that was set aside again, by arrival."""
        self._aside.remove(request)
        self._enter(request)

    def remove(self, request: Request) -> None:
        """Remove a request, queued or set aside."""
        self._forget(request)
        if request in self._aside:
            self._aside.remove(request)
        else:
            self._leave(request, had_turn=False)

    def _forget(self, request: Request) -> float | None:
        self.count_of[request.tenant] -= 1
        if not self.count_of[request.tenant]:
            del self.count_of[request.tenant]
        return self._since.pop(request)

    def _enter(self, request: Request) -> None:
        if request.priority not in self._classes:
            self._classes[request.priority] = PriorityClass(self._make_policy)
            bisect.insort(self._priorities, request.priority)
        of_priority = self._classes[request.priority]
        if self._since[request] is None:
            of_priority.preempted.push(request)
        else:
            of_priority.round_robin.push(request)

    def _leave(self, request: Request, had_turn: bool) -> None:
        of_priority = self._classes[request.priority]
        of_priority.remove(request, had_turn)
        if not of_priority:
            del self._classes[request.priority]
            self._priorities.remove(request.priority)
