"""Bodies that are still coming, which a server that ends does not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class OpenBodies:
    """Of one server, in one event loop.

    Attributes:
        have_ended: the server ends, and no body comes any further.
    """

    def __init__(self) -> None:
        self.have_ended = False
        self._limits = set[asyncio.Timeout]()

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError when the time is over, or when `end` is called."""
        async with asyncio.timeout(0 if self.have_ended else seconds) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    def end(self) -> None:
        self.have_ended = True
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())
