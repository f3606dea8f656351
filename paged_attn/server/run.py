"""Runs the app with Uvicorn: signals, draining and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn

from paged_attn.asynchronous.status import Status
from paged_attn.engine.engine import Engine
from paged_attn.server.app import create_app
from paged_attn.server.http.http_protocol import LimitedProtocol
from paged_attn.server.logs.tracing import Tracing
from paged_attn.server.settings import ServerSettings
from paged_attn.server.state import ServerState

GRACE_SECONDS = 5  # for answers to be sent after everything was cancelled
BACKLOG = 2048
# Longer than clients (httpx: 5) and load balancers (60) keep an idle connection: a request that meets its end on the way is reset.
KEEP_ALIVE_SECONDS = 75
FORCED_SECONDS = 1.0
DRAIN_STEP = 0.05
FILES_BESIDE = 256  # open files other than connections
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def listen(settings: ServerSettings) -> socket.socket:
    """A bound socket, so that a port in use is found out before the model loads.

    Raises:
        OSError: the address cannot be listened on; says which.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol named: asyncio sets TCP_NODELAY only then, and without it each answer waits 40 ms for the client's delayed ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux only: also covers data in the kernel's buffers after we close a connection
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.write_seconds * 1000))
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        hint = "choose another --host or --port, or stop what listens there"
        raise OSError(f"cannot listen on {settings.host} port {settings.port}: {error}; {hint}") from error


def allow_files(settings: ServerSettings) -> None:
    """Raise this process's limit of open files, as far as it may, to what all connections need.

    Raises:
        ValueError: it may not be raised so far; says what is allowed.
    """
    needed = settings.max_connections + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            what = f"needs {needed} open files, and this process may have {hard}"
            raise ValueError(f"max_connections is {settings.max_connections}, which {what}; lower it, or raise `ulimit -n`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Server(uvicorn.Server):
    """A server that drains: on SIGTERM or SIGINT no request is taken any more, running ones go on for `drain_seconds` and then end with
    503, and the engine is closed; until then the routes of /health answer. A second SIGINT ends it at once.

    Unlike uvicorn's own it does not die of the signal in the end, so that the exit status of an orderly end is 0.

    Args:
        on_ready: called once, when requests are served.
        on_drain: called once, when the end begins while calls run, with their number.
    """

    def __init__(
        self, make_engine: Callable[[], Engine], settings: ServerSettings, *, on_ready: Callable[[Engine], None] | None = None,
        on_drain: Callable[[int], None] | None = None, log_level: str = "warning", tracing: Tracing | None = None,
    ) -> None:  # fmt: skip
        self.settings, self._on_ready, self._on_drain = settings, on_ready, on_drain
        app = create_app(make_engine, settings, tracing)
        self.state: ServerState = app.state.server
        self.state.llm.thread.raises_start_failure = True  # `fatal_error`
        super().__init__(
            uvicorn.Config(
                app, log_level=log_level, lifespan="on", timeout_graceful_shutdown=GRACE_SECONDS,
                timeout_keep_alive=KEEP_ALIVE_SECONDS, access_log=False, ws="none",
                http=LimitedProtocol.of(settings),
            )
        )  # fmt: skip

    @property
    def fatal_error(self) -> BaseException | None:
        """Why there is no engine, if it could not be made, or if it died and takes other processes along."""
        thread = self.state.llm.thread
        return thread.error if thread.engine is None or not thread.engine.recovers else None

    async def on_tick(self, counter: int) -> bool:
        """Called every 0.1 s; True ends the server."""
        thread = self.state.llm.thread
        if self._on_ready is not None and thread.status is Status.READY and thread.engine is not None:
            self._on_ready(thread.engine)
            self._on_ready = None
        return await super().on_tick(counter) or (thread.status is Status.DEAD and self.fatal_error is not None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        thread = self.state.llm.thread
        thread.drain()
        if self._on_drain is not None and len(self.state.calls):
            self._on_drain(len(self.state.calls))
        try:
            await self._drained()
            thread.cancel_all()
            self.state.bodies.end()
            await super().shutdown(sockets)
        finally:
            if self.force_exit:  # then uvicorn does not tell the app, and prints the traceback of its being cancelled
                self.state.stop_seconds = FORCED_SECONDS
                await self.lifespan.shutdown()

    async def _drained(self) -> None:
        """Until all calls have ended, or their time is over."""
        ends = time.monotonic() + self.settings.drain_seconds
        while len(self.state.calls) and time.monotonic() < ends and not self.force_exit:
            await asyncio.sleep(DRAIN_STEP)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
