"""Queues that take turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from paged_attn.engine.requests.request import Request
from paged_attn.engine.scheduling.queue_policy import QueuePolicy


class RoundRobin:
    """A queue that is made of queues, one for each key, which have one turn each. What it is made of may be `RoundRobin` again.

    Args:
        key: whose line a request belongs to.
        make_policy: makes a line of its own for a key; a line that is empty is forgotten.
    """

    def __init__(self, key: Callable[[Request], Hashable], make_policy: Callable[[], QueuePolicy]) -> None:
        self._key, self._make_policy = key, make_policy
        self._lines: OrderedDict[Hashable, QueuePolicy] = OrderedDict()  # whose turn it is first

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def push(self, request: Request) -> None:
        key = self._key(request)
        if key not in self._lines:
            self._lines[key] = self._make_policy()
        self._lines[key].push(request)

    def next(self) -> Request:
        return next(iter(self._lines.values())).next()

    def remove(self, request: Request, had_turn: bool = False) -> None:
        """Forget a request; if it had its turn, the next key is next."""
        key = self._key(request)
        self._lines[key].remove(request, had_turn)
        if had_turn:
            self._lines.move_to_end(key)
        if not self._lines[key]:
            del self._lines[key]
