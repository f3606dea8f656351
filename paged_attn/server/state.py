"""The state that all routes share: engine, calls, logs and counters of one server."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from paged_attn.asynchronous.async_llm import STOP_SECONDS, AsyncLLM
from paged_attn.asynchronous.errors import Status
from paged_attn.engine.engine import Engine
from paged_attn.server.http.body_limits import OpenBodies
from paged_attn.server.http.call import Calls
from paged_attn.server.logs.call_log import LineWriter
from paged_attn.server.logs.metrics import ServerMetrics
from paged_attn.server.logs.tracing import Tracing
from paged_attn.server.settings import ServerSettings

logger = logging.getLogger("paged_attn")


class ServerState:
    """What the routes need: `app.state.server`."""

    def __init__(self, make_engine: Callable[[], Engine], settings: ServerSettings, tracing: Tracing | None = None) -> None:
        self.settings = settings
        self.stop_seconds = STOP_SECONDS
        self.created = int(time.time())
        self.calls, self.bodies = Calls(), OpenBodies()
        self.log = LineWriter(sys.stdout) if settings.log_requests else None
        if tracing is None and settings.otlp_endpoint is not None:
            tracing = Tracing.to(settings.otlp_endpoint, settings.first_name)
        self.tracing = tracing
        self.metrics = ServerMetrics(lambda: self.llm.thread.snapshot, lambda: self.llm.thread.status is Status.READY, settings.max_queue)
        self.llm = AsyncLLM.of_engine(
            make_engine, max_queue=settings.max_queue, queue_seconds=settings.queue_seconds, observer=self.metrics
        )

    def close(self) -> None:
        """End the engine's thread and what it holds."""
        if not self.llm.stop(self.stop_seconds):
            logger.warning("the engine's thread did not end within %g s; it ends with the process", self.stop_seconds)
        for part in (self.log, self.tracing):
            if part is not None:
                part.close()
