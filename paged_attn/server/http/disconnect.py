"""Runs work for a client that may disconnect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
PIECE = 64 << 10  # bytes; asyncio tells that a client takes nothing from so many on


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T | None:
    """What `work` returns, or None, and `work` cancelled, if the client leaves first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Connection(Protocol):
    """In `scope["state"]["connection"]` if our own server runs the app (`LimitedProtocol`)."""

    @property
    def takes_chunks(self) -> bool: ...

    async def send_chunk(self, data: bytes) -> None: ...


class EventStream(Response):
    """Server-sent events. `close` is called at the end, whichever way it came.

    Starlette's own StreamingResponse sees, with newer ASGI versions, that a client has left only when it sends the next part; a request
    that waits in the queue sends none.

    Args:
        groups: events without the empty line after each, in groups that are sent together; large ones in pieces, each when the client has
            taken most of those before, so that one that reads slowly is not cut off as one that reads nothing.
    """

    media_type = "text/event-stream"

    def __init__(self, groups: AsyncIterator[list[str]], close: Callable[[], None]) -> None:
        self.groups, self.close = groups, close
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(OSError):  # raised by `send` when the client is gone, in newer ASGI versions
                await unless_gone(receive, self._send_all(send, scope.get("state", {}).get("connection")))
        finally:
            self.close()

    async def _send_all(self, send: Send, connection: Connection | None) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def through_app(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        send_piece = connection.send_chunk if connection is not None and connection.takes_chunks else through_app
        async for events in self.groups:
            if not events:
                continue
            data = "".join(f"{event}\n\n" for event in events).encode()
            for start in range(0, len(data), PIECE):
                await send_piece(data[start : start + PIECE])
        await send({"type": "http.response.body", "body": b"", "more_body": False})
