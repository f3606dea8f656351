"""The routes for operators: whether the process lives, whether it serves, and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from paged_attn.server.status import Status

if TYPE_CHECKING:
    from paged_attn.server.app import ServerState

router = APIRouter()
ALIVE = (Status.LOADING, Status.READY, Status.DRAINING)


@router.get("/health/live")
async def live(request: Request) -> Response:
    """200 as long as a restart would not help: while the model loads, requests are served, or the server drains."""
    return _answer(request, ALIVE)


@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """200 while requests are served; otherwise 503 with the reason."""
    return _answer(request, (Status.READY,))


@router.get("/health")
async def health(request: Request) -> Response:
    """As /health/ready."""
    return _answer(request, (Status.READY,))


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    state: ServerState = request.app.state.server
    return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _answer(request: Request, good: tuple[Status, ...]) -> Response:
    state: ServerState = request.app.state.server
    thread = state.thread
    return JSONResponse({"status": str(thread.status), "reason": thread.describe()}, 200 if thread.status in good else 503)
