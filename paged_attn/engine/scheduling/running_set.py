"""The running requests, the most urgent first, and among equals the oldest."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from paged_attn.engine.requests.request import Request
from paged_attn.engine.requests.request_rows import RequestRows

COMPARED_PAGES = (0, 4, 16, 64, 256, 1024)  # requests with the same page at one of these indices share all pages before it


class RunningSet:
    """Requests by priority and arrival. Finding and removing one is O(1); so is adding one that comes last. `rows`: the numbers and pages
    of requests while they run."""

    def __init__(self, max_requests: int) -> None:
        self.rows = RequestRows(max_requests)
        self._requests: dict[Request, None] = {}
        self._in_order: tuple[list[Request], NDArray[np.int64]] | None = None  # computed on demand, like the next one
        self._by_prefix: list[Request] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def last(self) -> Request:
        """The least urgent request, the newest of those: it is preempted first."""
        return next(reversed(self._requests))

    def from_last(self) -> Iterator[Request]:
        """All requests in the order of preemption."""
        return reversed(self._requests)

    def in_order(self) -> tuple[list[Request], NDArray[np.int64]]:
        """All requests, and the index of each in `rows` [requests]; read-only."""
        if self._in_order is None:
            requests = list(self._requests)
            self._in_order = requests, _indices(requests)
        return self._in_order

    def indices(self, requests: list[Request]) -> NDArray[np.int64]:
        """The indices of these requests in `rows`."""
        everyone, indices = self.in_order()
        return indices if requests == everyone else _indices(requests)

    def without(self, left_out: Collection[Request]) -> list[Request]:
        """All requests except these, in order."""
        return [request for request in self._requests if request not in left_out] if left_out else self.in_order()[0]

    def by_prefix(self, requests: list[Request]) -> list[Request]:
        """These requests, with those that begin with the same pages next to each other, because kernels read such pages once. Unchanged if
        no two do."""
        if len(requests) < 2:
            return requests
        everyone, _ = self.in_order()
        if requests != everyone:
            return self._sorted_by_prefix(requests)
        if self._by_prefix is None:
            self._by_prefix = self._sorted_by_prefix(requests)
        return self._by_prefix

    def _sorted_by_prefix(self, requests: list[Request]) -> list[Request]:
        pages = self.rows.pages[self.indices(requests)]
        compared = [pages[:, column] for column in COMPARED_PAGES if column < pages.shape[1]]
        if not compared or len(np.unique(compared[0])) == len(requests):
            return requests
        return [requests[index] for index in np.lexsort(compared[::-1]).tolist()]

    def add(self, request: Request) -> None:
        in_order = not self._requests or _rank(self.last) <= _rank(request)
        request.move_to(self.rows)
        self._requests[request] = self._in_order = self._by_prefix = None
        if not in_order:
            self._requests = dict.fromkeys(sorted(self._requests, key=_rank))

    def remove(self, request: Request) -> None:
        del self._requests[request]
        request.move_to(RequestRows(1))
        self._in_order = self._by_prefix = None


def _indices(requests: list[Request]) -> NDArray[np.int64]:
    return np.array([request.row for request in requests], np.int64)


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival
