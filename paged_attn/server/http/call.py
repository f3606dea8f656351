"""One HTTP request from its arrival to the end of its answer, and all those that the engine is working on."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive

from paged_attn.asynchronous.job import Job
from paged_attn.server.http.callers import Caller
from paged_attn.server.http.disconnect import unless_gone
from paged_attn.server.http.errors import ApiError

T = TypeVar("T")
MAX_ID = 128  # characters of an x-request-id


@dataclass(eq=False)
class Call:
    """`request.state.call`.

    Attributes:
        id: the client's x-request-id, or one of ours.
        arrived: by `time.perf_counter`; began: nanoseconds since the epoch.
        job: what the engine does for it, once that is known.
        status: of its answer; 0 before there is one.
        failure: what ended it before its time.
        afterwards: closed when the answer has ended.
    """

    id: str
    method: str
    path: str
    arrived: float = field(default_factory=time.perf_counter)
    began: int = field(default_factory=time.time_ns)
    job: Job | None = None
    status: int = 0
    failure: ApiError | None = None
    afterwards: ExitStack = field(default_factory=ExitStack)
    _working: asyncio.Future[Any] | None = None

    def fail(self, error: ApiError) -> None:
        """End it wherever it is: before its answer has begun with this answer, in a stream with this as the last event."""
        if self.failure is None:
            self.failure = error
            if self._working is not None:
                self._working.cancel()
            elif self.job is not None:
                self.job.receive(error)

    def fail_after(self, seconds: float, error: ApiError) -> None:
        """Let it fail when it is as old as this and has not ended."""
        left = seconds - (time.perf_counter() - self.arrived)
        self.afterwards.callback(asyncio.get_running_loop().call_later(left, self.fail, error).cancel)

    async def unless_ended(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` returns; None, and `work` cancelled, if the client leaves first. Raises ApiError: what `fail` was called with; then
        `work` was cancelled, too."""
        result = None
        working = self._working = asyncio.ensure_future(work)
        try:
            result = await unless_gone(receive, working)
        except asyncio.CancelledError:
            if self.failure is None:
                raise
        finally:
            self._working = None
        if self.failure is not None:
            raise self.failure
        return result


def request_id(given: str | None) -> str:
    """The client's own id, if it is printable and not too long, or a new one."""
    if given is not None and 0 < len(given) <= MAX_ID and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


class Calls:
    """The calls that the engine works for, by tenant and id; a client may use an id for several. For the event loop."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], set[Call]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def enter(self, call: Call, caller: Caller) -> None:
        """Until its answer has ended it is one of them."""
        key = caller.tenant, call.id
        self._calls.setdefault(key, set()).add(call)
        call.afterwards.callback(self._leave, key, call)

    def cancel(self, caller: Caller, id: str) -> int:
        """End a tenant's calls of this id; returns how many there were."""
        calls = list(self._calls.get((caller.tenant, id), ()))
        for call in calls:
            call.fail(ApiError(499, f"the request was cancelled by its id, {id!r}", code="cancelled"))
        return len(calls)

    def _leave(self, key: tuple[str, str], call: Call) -> None:
        self._calls[key].remove(call)
        if not self._calls[key]:
            del self._calls[key]
