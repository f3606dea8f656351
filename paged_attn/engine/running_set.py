"""The requests that run, the most urgent and oldest first."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from paged_attn.engine.request import Request
from paged_attn.engine.step_plan import Scheduled


class RunningSet:
    """Requests by priority and arrival. Finding and removing one is O(1); adding one is, too, unless it goes before others."""

    def __init__(self) -> None:
        self._requests: dict[Request, Scheduled] = {}  # made once, for the many steps in which it decodes

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def last(self) -> Request:
        """The least urgent, and the newest of those: who is preempted first."""
        return next(reversed(self._requests))

    def from_last(self) -> Iterator[Request]:
        """In the order of preemption."""
        return reversed(self._requests)

    def one_token_each(self, left_out: Collection[Request] = ()) -> list[Scheduled]:
        """A step in which all but some decode."""
        if not left_out:
            return list(self._requests.values())
        return [decode for request, decode in self._requests.items() if request not in left_out]

    def add(self, request: Request) -> None:
        in_order = not self._requests or _rank(self.last) <= _rank(request)
        self._requests[request] = Scheduled(request, 1, True)
        if not in_order:
            self._requests = dict(sorted(self._requests.items(), key=lambda item: _rank(item[0])))

    def remove(self, request: Request) -> None:
        del self._requests[request]


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival
