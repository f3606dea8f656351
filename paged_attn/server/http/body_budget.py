"""How many bytes the bodies of all requests may take together."""

from __future__ import annotations

from collections import Counter

from paged_attn.server.http.errors import ApiError

SMALL = 64 << 10  # bodies up to this size always find room: connections are limited, too


class BodyBudget:
    """Of one server, for the event loop. A tenant may hold as much as it leaves free, so that no other finds nothing."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: Counter[str] = Counter()  # by tenant
        self.total = 0

    def take(self, tenant: str, before: int, size: int) -> None:
        """A body of `before` bytes has grown by `size`.

        Raises:
            ApiError: 429 if there is no room for it; nothing is taken then.
        """
        if before + size > SMALL and self.held[tenant] + size > self.most - self.total - size:
            room = f"{self.total / 2**20:.0f} of {self.most / 2**20:g} MiB are taken"
            raise ApiError(429, f"too many large bodies at the same time: {room}; try again later", code="bodies_too_large", retry_after=1)
        self.held[tenant] += size
        self.total += size

    def give_back(self, tenant: str, size: int) -> None:
        self.total -= size
        self.held[tenant] -= size
        if not self.held[tenant]:
            del self.held[tenant]
