"""The FastAPI app: the engine's thread, the guard and the routes put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from paged_attn import __version__
from paged_attn.engine.engine import Engine
from paged_attn.server.api import docs_page, health, lora_routes, pooling_routes, routes, token_routes
from paged_attn.server.http import errors
from paged_attn.server.http.guard import Guard
from paged_attn.server.logs.call_log import CallLog
from paged_attn.server.logs.tracing import Tracing
from paged_attn.server.settings import ServerSettings
from paged_attn.server.state import ServerState


def create_app(make_engine: Callable[[], Engine], settings: ServerSettings, tracing: Tracing | None = None) -> FastAPI:
    """An ASGI app that loads its engine when it starts (503 until then) and closes it when it ends.

    Args:
        make_engine: called once, on the engine's own thread; `lambda: LLM(path).engine` for example.
        tracing: for OpenTelemetry of your own; default: what the settings say.
    """
    state = ServerState(make_engine, settings, tracing)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.llm.thread.start()
        yield
        await asyncio.to_thread(state.close)

    app = FastAPI(title="paged_attn", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = state
    known = set[str]()
    adapters = [lora_routes.router] if settings.lora_folder is not None else []
    for router in (health.router, routes.router, pooling_routes.router, token_routes.router, docs_page.router, *adapters):
        app.include_router(router)
        known |= {path for route in router.routes if "{" not in (path := str(getattr(route, "path", "")))}
    errors.add_handlers(app)
    # The last one added is the first one asked.
    app.add_middleware(
        Guard,
        settings=settings,
        bodies=state.bodies,
        responded=lambda path, status: state.metrics.responded(path if path in known else "other", status),
    )
    app.add_middleware(CallLog, log=state.log, tracing=state.tracing)
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allow_origins), allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    return app
