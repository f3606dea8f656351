"""The tenant of a request, identified by its API key, and how much of the server one tenant may use."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from paged_attn.server.http.errors import ApiError
from paged_attn.server.settings import ServerSettings

MAX_IDLE = 10_000  # tenants whose rate is remembered; on an open server each address is a tenant


@dataclass(frozen=True)
class Caller:
    """Whoever sent a request.

    Attributes:
        tenant: with whom others share the queue fairly: `key-1`, the first of the API keys, or an address on an open server.
        key: `key-1`, or None on an open server.
    """

    tenant: str
    key: str | None

    def namespace(self, salt: str | None, share_prefixes: bool) -> Hashable:
        """Whose cached prefixes its requests share: those of the same key and salt; with `share_prefixes` of the same salt."""
        # Not the salt itself, which may be long, and stays in the prefix cache as long as its pages do.
        digest = None if salt is None else hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=16).digest()
        return None if share_prefixes else self.key, digest


class Callers:
    """Knows the API keys, and counts the requests of each tenant. For the event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self._keys = [key.encode() for key in settings.api_keys]
        self._most, self._per_minute = settings.max_requests_per_key, settings.requests_per_minute_per_key
        self._running: Counter[str] = Counter()
        self._next_at: dict[str, float] = {}  # when a tenant would have none left, if it had asked once a minute / per_minute

    def identify(self, headers: Mapping[bytes, bytes], client: tuple[str, int] | None, needs_key: bool) -> Caller:
        """Who has sent these headers. Raises ApiError: 401 without a key that opens the server, where one is needed."""
        authorization = headers.get(b"authorization", b"")
        if not authorization and (own := headers.get(b"x-api-key")):  # sent by Anthropic's clients
            authorization = b"Bearer " + own
        scheme, _, given = authorization.partition(b" ")
        known = [secrets.compare_digest(given.strip(), each) for each in self._keys]  # all of them: no time tells which
        if scheme.lower() == b"bearer" and any(known):
            name = f"key-{known.index(True) + 1}"
            return Caller(name, name)
        if self._keys and needs_key:
            what = "the API key is not known to this server" if authorization else "no API key was sent"
            raise ApiError(401, f"{what}; send the header Authorization: Bearer KEY, or x-api-key: KEY")
        return Caller(client[0] if client is not None else "nobody", None)

    @contextlib.contextmanager
    def counted(self, caller: Caller) -> Iterator[None]:
        """Around one request. Raises ApiError: 429 if the tenant has too many of them, now or in this minute."""
        self._count_in_minute(caller.tenant)
        if self._most is not None and self._running[caller.tenant] >= self._most:
            what = f"this key has {self._most} requests that run or wait, and may have no more"
            raise ApiError(429, f"{what}; wait for one of them to end", code="too_many_requests", retry_after=1)
        self._running[caller.tenant] += 1
        try:
            yield
        finally:
            self._running[caller.tenant] -= 1
            if not self._running[caller.tenant]:
                del self._running[caller.tenant]

    def _count_in_minute(self, tenant: str) -> None:
        """A token bucket (GCRA): a minute's requests at once, and then one every 60 / per_minute seconds."""
        if self._per_minute is None:
            return
        now, each = time.monotonic(), 60.0 / self._per_minute
        if len(self._next_at) > MAX_IDLE:
            self._next_at = {name: at for name, at in self._next_at.items() if at > now}
        due = max(self._next_at.get(tenant, now), now)
        if due - now > 60.0 - each:
            wait = int(due - now - (60.0 - each)) + 1
            message = f"this key may send {self._per_minute} requests a minute; try again in {wait} s"
            raise ApiError(429, message, code="rate_limited", retry_after=wait)
        self._next_at[tenant] = due + each
