"""The FastAPI app: the engine's thread, the guard and the routes put together."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from paged_attn import __version__
from paged_attn.engine.engine import Engine
from paged_attn.server import errors, health, routes
from paged_attn.server.call import Calls
from paged_attn.server.call_log import CallLog
from paged_attn.server.engine_thread import EngineThread
from paged_attn.server.fair_pool import FairPool
from paged_attn.server.guard import Guard
from paged_attn.server.line_writer import LineWriter
from paged_attn.server.metrics import ServerMetrics
from paged_attn.server.settings import ServerSettings
from paged_attn.server.status import Status
from paged_attn.server.texts import Texts
from paged_attn.server.tracing import Tracing

logger = logging.getLogger("paged_attn")
STOP_SECONDS = 10.0


class ServerState:
    """What the routes need: `app.state.server`."""

    def __init__(self, make_engine: Callable[[], Engine], settings: ServerSettings, tracing: Tracing | None = None) -> None:
        self.settings = settings
        self.created = int(time.time())
        self.texts: Texts | None = None
        self.calls = Calls()
        self.guide_pool = FairPool("paged-attn-guides", threads=1, long_threads=1)
        self.log = LineWriter(sys.stdout) if settings.log_requests else None
        if tracing is None and settings.otlp_endpoint is not None:
            tracing = Tracing.to(settings.otlp_endpoint, settings.model_name)
        self.tracing = tracing
        self.metrics = ServerMetrics(lambda: self.thread.snapshot, lambda: self.thread.status is Status.READY, settings.max_queue)
        self.thread = EngineThread(lambda: self._made(make_engine), settings.max_queue, self.metrics, settings.queue_seconds)

    def _made(self, make_engine: Callable[[], Engine]) -> Engine:
        engine = make_engine()
        self.texts = Texts(engine.tokenizer, engine.new_requests.room)
        return engine

    def close(self) -> None:
        """End the engine's thread and what it holds."""
        if not self.thread.stop(STOP_SECONDS):
            logger.warning("the engine's thread did not end within %g s; it ends with the process", STOP_SECONDS)
        for part in (self.texts, self.guide_pool, self.log, self.tracing):
            if part is not None:
                part.close()


def create_app(make_engine: Callable[[], Engine], settings: ServerSettings, tracing: Tracing | None = None) -> FastAPI:
    """An ASGI app that loads its engine when it starts (503 until then) and closes it when it ends.

    Args:
        make_engine: called once, on the engine's own thread; `lambda: LLM(path).engine` for example.
        tracing: for OpenTelemetry of your own; default: what the settings say.
    """
    state = ServerState(make_engine, settings, tracing)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.thread.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(state.close)  # not in a finally: a forced end cancels this, and shall not wait

    app = FastAPI(title="paged_attn", version=__version__, lifespan=lifespan)
    app.state.server = state
    known = set[str]()
    for router in (health.router, routes.router):
        app.include_router(router)
        known |= {path for route in router.routes if "{" not in (path := str(getattr(route, "path", "")))}
    errors.add_handlers(app)
    # The last one added is the first one asked.
    app.add_middleware(
        Guard, settings=settings, responded=lambda path, status: state.metrics.responded(path if path in known else "other", status)
    )
    app.add_middleware(CallLog, log=state.log, tracing=state.tracing)
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allow_origins), allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    return app
