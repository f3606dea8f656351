"""Uvicorn's HTTP over one connection, with limits on the number of connections and on how long a client may take to send or to read."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from paged_attn.server.http.body_limits import OpenBodies
from paged_attn.server.http.errors import ApiError
from paged_attn.server.settings import ServerSettings

_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 503: b"Service Unavailable"}


class LimitedProtocol(H11Protocol):
    """`of` makes one for a server."""

    settings: ServerSettings
    bodies: OpenBodies

    @classmethod
    def of(cls, settings: ServerSettings, bodies: OpenBodies) -> type[LimitedProtocol]:
        return type(cls.__name__, (cls,), {"settings": settings, "bodies": bodies})

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._timer: asyncio.TimerHandle | None = None  # until the headers are complete
        self._write_timer: asyncio.TimerHandle | None = None
        self.app_state = {**self.app_state, "connection": self}  # uvicorn copies it into the `state` of each scope

    @property
    def takes_chunks(self) -> bool:
        """Whether an answer of unknown length is sent in chunks; a client of HTTP/1.0 gets it as it is, to the end of the connection."""
        return self.conn.their_http_version == b"1.1"

    async def send_chunk(self, data: bytes) -> None:
        """Sends more of an answer that has begun and that goes out in chunks; waits while the client takes nothing.

        A stream sends one chunk for each token. The layers of middleware, uvicorn and h11 would take three times as long for it as the
        socket does, on the GIL that the engine's thread needs, too.
        """
        if self.flow.write_paused:
            await self.flow.drain()
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.bodies.have_ended:  # it was being accepted while uvicorn told all others
            self._refuse(ApiError(503, "the server ends; connect to another", code="shutting_down"))
        elif len(self.connections) > self.settings.max_connections:
            what = f"this server has {self.settings.max_connections} connections and takes no more"
            self._refuse(ApiError(503, f"{what}; try again later", code="too_many_connections"))
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._expect_headers()  # some of the next request's have come
        else:
            self._cancel_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE:
            self._cancel_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self.resume_writing()
        self.app_state = {}
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """More is to be sent than the client takes."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.settings.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """For what h11 does not take as HTTP."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun, into which nothing may be written
            self.transport.close()
            return
        self._refuse(ApiError(400, f"this is not an HTTP request that the server can read: {msg}"))

    def _expect_headers(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.settings.header_seconds, self._too_slow)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        seconds = self.settings.header_seconds
        self._refuse(ApiError(408, f"the headers of a request did not come within {seconds:g} s", code="headers_too_slow"))

    def _refuse(self, error: ApiError) -> None:
        """Answer by hand, for there is no request, and close the connection."""
        body = bytes(error.response().body)
        lines = [b"HTTP/1.1 %d %s" % (error.status, _REASONS[error.status]), b"content-type: application/json", b"connection: close"]
        self.transport.write(b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body]))
        self.transport.close()
