"""The FastAPI app: the engine's thread, the guard and the routes put together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from paged_attn import __version__
from paged_attn.engine.engine import Engine
from paged_attn.server import errors, routes
from paged_attn.server.engine_thread import EngineThread
from paged_attn.server.guard import Guard
from paged_attn.server.metrics import ServerMetrics
from paged_attn.server.settings import ServerSettings
from paged_attn.server.status import Status
from paged_attn.server.texts import Texts

logger = logging.getLogger("paged_attn")
STOP_SECONDS = 10.0


class ServerState:
    """What the routes need: `app.state.server`."""

    def __init__(self, make_engine: Callable[[], Engine], settings: ServerSettings) -> None:
        self.settings = settings
        self.created = int(time.time())
        self.texts: Texts | None = None
        self.metrics = ServerMetrics(lambda: self.thread.snapshot, lambda: self.thread.status is Status.READY, settings.max_queue)
        self.thread = EngineThread(lambda: self._made(make_engine), settings.max_queue, self.metrics)

    def _made(self, make_engine: Callable[[], Engine]) -> Engine:
        engine = make_engine()
        self.texts = Texts(engine.tokenizer)
        return engine

    def close(self) -> None:
        """End the engine's thread and what it holds."""
        if not self.thread.stop(STOP_SECONDS):
            logger.warning("the engine's thread did not end within %g s; it ends with the process", STOP_SECONDS)
        if self.texts is not None:
            self.texts.close()


def create_app(make_engine: Callable[[], Engine], settings: ServerSettings) -> FastAPI:
    """An ASGI app that loads its engine when it starts (503 until then) and closes it when it ends.

    Args:
        make_engine: called once, on the engine's own thread; `lambda: LLM(path).engine` for example.
    """
    state = ServerState(make_engine, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.thread.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(state.close)  # not in a finally: a forced end cancels this, and shall not wait

    app = FastAPI(title="paged_attn", version=__version__, lifespan=lifespan)
    app.state.server = state
    app.include_router(routes.router)
    known = frozenset(path for route in routes.router.routes if "{" not in (path := str(getattr(route, "path", ""))))
    errors.add_handlers(app)
    app.add_middleware(
        Guard, api_keys=settings.api_keys, max_body_bytes=settings.max_body_bytes,
        responded=lambda path, status: state.metrics.responded(path if path in known else "other", status),
    )  # fmt: skip
    return app
