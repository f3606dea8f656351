"""What all routes share: the engine's thread, texts, calls, logs and numbers of one server."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from paged_attn.engine.engine import Engine
from paged_attn.server.logs.line_writer import LineWriter
from paged_attn.server.logs.metrics import ServerMetrics
from paged_attn.server.logs.tracing import Tracing
from paged_attn.server.settings import ServerSettings
from paged_attn.server.work.call import Calls
from paged_attn.server.work.engine_thread import EngineThread
from paged_attn.server.work.fair_pool import FairPool
from paged_attn.server.work.status import Status
from paged_attn.server.work.texts import Texts

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
        self.texts = Texts(engine.tokenizer, engine.input_processor.room)
        return engine

    def close(self) -> None:
        """End the engine's thread and what it holds."""
        if not self.thread.stop(STOP_SECONDS):
            logger.warning("the engine's thread did not end within %g s; it ends with the process", STOP_SECONDS)
        for part in (self.texts, self.guide_pool, self.log, self.tracing):
            if part is not None:
                part.close()
