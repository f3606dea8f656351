"""The routes for operators: liveness, readiness and metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, PlainTextResponse, Response

from paged_attn import __version__
from paged_attn.asynchronous.errors import Status
from paged_attn.server.api.request_state import state_of

router = APIRouter()
NOT_NOW: dict[int | str, dict[str, Any]] = {503: {"description": "not now; the body says why"}}
ALIVE = (Status.LOADING, Status.READY, Status.DRAINING)


@router.get("/health/live", responses=NOT_NOW)
async def live(request: Request) -> Response:
    """200 as long as a restart would not help: while the model loads, requests are served, or the server drains."""
    return _answer(request, ALIVE)


@router.get("/health/ready", responses=NOT_NOW)
async def ready(request: Request) -> Response:
    """200 while requests are served; otherwise 503 with the reason."""
    return _answer(request, (Status.READY,))


@router.get("/ping", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/health", responses=NOT_NOW)
async def health(request: Request) -> Response:
    """As /health/ready."""
    return _answer(request, (Status.READY,))


@router.get("/version")
async def version() -> Response:
    """The version of paged_attn."""
    return JSONResponse({"version": __version__})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(state_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _answer(request: Request, good: tuple[Status, ...]) -> Response:
    thread = state_of(request).llm.thread
    return JSONResponse({"status": str(thread.status), "reason": thread.describe()}, 200 if thread.status in good else 503)
