"""Runs the app with Uvicorn: signals, draining and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from paged_attn.asynchronous.errors import Status
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
    """A bound socket, so that a port in use is found out before the model loads, and so is a certificate that cannot be read. Raises
    OSError: the address cannot be listened on, or TLS not be offered; says which."""
    _check_certificate(settings)
    if settings.uds is not None:
        return _listen_on_path(settings.uds)
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


def _listen_on_path(path: str) -> socket.socket:
    if Path(path).is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            if client.connect_ex(path) == errno.ECONNREFUSED:  # left by a server that was killed
                Path(path).unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {path}: {error}; choose another --uds, or stop what listens there") from error


def _check_certificate(settings: ServerSettings) -> None:
    if settings.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:
        files = " and ".join(filter(None, (settings.ssl_certfile, settings.ssl_keyfile)))
        hint = "give --ssl-certfile a PEM file of the certificate, and --ssl-keyfile one of its key"
        raise OSError(f"no certificate with its key can be read from {files}: {error}; {hint}") from error


def url_of(listener: socket.socket, settings: ServerSettings) -> str:
    """Where clients find the server."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = listener.getsockname()[:2]
    return f"http{'s' * (settings.ssl_certfile is not None)}://{f'[{host}]' if ':' in host else host}:{port}"


def allow_files(settings: ServerSettings) -> None:
    """Raise this process's limit of open files, as far as it may, to what all connections need. Raises ValueError: it may not be raised so
    far; says what is allowed."""
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
                http=LimitedProtocol.of(settings, self.state.bodies), ssl_certfile=settings.ssl_certfile, ssl_keyfile=settings.ssl_keyfile,
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
            if self.settings.uds is not None:
                Path(self.settings.uds).unlink(missing_ok=True)
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
