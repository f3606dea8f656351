"""Limits on bodies: bytes of all together, JSON values (counted while bytes arrive), and time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from paged_attn.server.http.errors import ApiError

SMALL = 64 << 10  # bytes; smaller bodies always fit, because connections are limited too
MAX_VALUES = 1 << 20  # enough for a prompt of a million token ids
MAX_DEPTH = 100
_QUOTE, _OPEN, _CLOSE, _COMMA, _BACKSLASH, _ZERO = range(1, 7)
_KINDS = np.zeros(256, np.int8)
for _characters, _kind in ((b'"', _QUOTE), (b"[{", _OPEN), (b"]}", _CLOSE), (b",", _COMMA), (b"\\", _BACKSLASH), (b"\0", _ZERO)):
    _KINDS[list(_characters)] = _kind


class BodyShape:
    """Counts the values of a JSON body and how deeply they are nested, without building any of them. Counts of anything but JSON are
    arbitrary."""

    def __init__(self) -> None:
        self.values = 1
        self.depth = 0
        self._in_string = False
        self._escapes = False  # the last byte is a backslash that escapes the next one

    def feed(self, part: bytes) -> None:
        """Take in the next bytes. Raises ApiError: 400 for too many values, for values that lie too deep, or for bytes that no UTF-8 JSON
        has."""
        every_kind = _KINDS[np.frombuffer(part, np.uint8)]
        offsets = np.flatnonzero(every_kind)
        kinds = every_kind[offsets]
        if (kinds == _ZERO).any():
            raise ApiError(400, "the body holds a zero byte; send JSON in UTF-8")
        quotes = kinds == _QUOTE
        if self._escapes or (kinds == _BACKSLASH).any():
            quotes &= ~self._escaped(offsets, kinds, len(part))
        outside = (np.cumsum(quotes) + self._in_string) % 2 == 0
        self._in_string ^= bool(quotes.sum() % 2)
        opens, closes = outside & (kinds == _OPEN), outside & (kinds == _CLOSE)
        depths = self.depth + np.cumsum(opens.astype(np.int64) - closes)
        self.values += int(opens.sum() + (outside & (kinds == _COMMA)).sum())
        self.depth = int(depths[-1]) if len(depths) else self.depth
        if self.values > MAX_VALUES:
            raise ApiError(400, f"the body holds more than {MAX_VALUES:,} values; send long prompts as text, or in several requests")
        if depths.max(initial=0) > MAX_DEPTH:
            raise ApiError(400, f"the body nests values more than {MAX_DEPTH} deep; allowed are at most {MAX_DEPTH}")

    def _escaped(self, offsets: NDArray[np.intp], kinds: NDArray[np.int8], size: int) -> NDArray[np.bool_]:
        """Which of the bytes at these offsets follow an odd number of backslashes."""
        if self._escapes:  # as if it stood at the beginning
            offsets, kinds = np.concatenate([[-1], offsets]), np.concatenate([[_BACKSLASH], kinds])
        is_backslash = kinds == _BACKSLASH
        follows = np.concatenate([[False], is_backslash[:-1] & (np.diff(offsets) == 1)])
        run_starts = np.maximum.accumulate(np.where(is_backslash & ~follows, offsets, -2))
        is_odd = is_backslash & ((offsets - run_starts) % 2 == 0)
        escaped: NDArray[np.bool_] = follows & np.concatenate([[False], is_odd[:-1]])
        carried = int(self._escapes)
        if size:
            self._escapes = bool(len(offsets)) and offsets[-1] == size - 1 and bool(is_odd[-1])
        return escaped[carried:]


class BodyBudget:
    """How many bytes the bodies of all requests of one server may take together, for the event loop. A tenant may
    hold as much as it leaves free, so that no other finds nothing."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: Counter[str] = Counter()  # by tenant
        self.total = 0

    def take(self, tenant: str, before: int, size: int) -> None:
        """A body of `before` bytes has grown by `size`. Raises ApiError: 429 if there is no room for it; nothing is taken then."""
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


class OpenBodies:
    """Bodies that are still coming, which a server that ends does not wait for. Of one server, in one event loop. `have_ended`: the server
    ends, and no body comes any further."""

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
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
