"""The outermost layer: the id of a request, its trace, and its log line, which a thread of its own writes."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from typing import Any, TextIO

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_attn.server.http.call import Call, request_id
from paged_attn.server.http.callers import Caller
from paged_attn.server.http.errors import CLIENT_GONE, api_error, error_answer, unforeseen
from paged_attn.server.logs.tracing import Tracing

logger = logging.getLogger("paged_attn")
QUIET = ("/health", "/metrics")  # polled every few seconds
MAX_WAITING = 10_000  # lines; more are dropped
CLOSE_SECONDS = 1.0


class CallLog:
    """ASGI middleware. Accepts and echoes `x-request-id`, and makes `request.state.call`.

    Args:
        log: takes a line of JSON for each request; None: nothing is written.
        tracing: None: nothing is traced.
    """

    def __init__(self, app: ASGIApp, log: LineWriter | None, tracing: Tracing | None) -> None:
        self.app, self.log, self.tracing = app, log, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        call = Call(request_id(headers.get("x-request-id")), scope["method"], scope["path"])
        state = scope.setdefault("state", {})
        state["call"] = call

        async def answering(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                given = MutableHeaders(scope=message)
                given["x-request-id"] = given["request-id"] = call.id  # Anthropic's client reads the latter
            await send(message)

        try:
            await self.app(scope, receive, answering)
        except Exception as error:  # unforeseen: caught here, not further out, so that the answer still gets its id and log line
            logger.exception("the request %s failed", call.id)
            if call.status:
                raise
            await error_answer(scope, unforeseen(error))(scope, receive, answering)
        finally:
            call.afterwards.close()
            facts = facts_of(call, state.get("caller"), scope.get("client"))
            if self.tracing is not None and not call.path.startswith(QUIET):
                self.tracing.record(call, facts, headers)
            if self.log is not None and not call.path.startswith(QUIET):
                self.log.write(json.dumps(facts))


def facts_of(call: Call, caller: Caller | None, client: tuple[str, int] | None) -> dict[str, Any]:
    """What is known of a request when its answer has ended; what does not concern it is left out."""
    failure = call.failure or (None if call.job is None else call.job.failure)
    error = None if failure is None else api_error(failure)
    facts: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(call.began // 10**9)) + f".{call.began // 10**6 % 1000:03}Z",
        "request_id": call.id, "client": client[0] if client is not None else None,
        "key": caller.key if caller is not None else None, "method": call.method[:20], "path": call.path[:200],
        "status": call.status or CLIENT_GONE, "seconds": round(time.perf_counter() - call.arrived, 4),
        "error": None if error is None else error.code or error.type,
    }  # fmt: skip
    if call.job is not None:
        job, counts = call.job, call.job.usage()
        ends = sorted({str(request.finish_reason) for request in job.requests if request.finish_reason is not None})
        first = job.first_token_at
        facts |= {
            "prompts": len(job.prompts), "answers": job.size, "finish_reasons": ends, "prompt_tokens": counts["prompt_tokens"],
            "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"], "completion_tokens": counts["completion_tokens"],
            "first_token_seconds": None if first is None else round(first - job.arrived, 4),
        }  # fmt: skip
    return {name: value for name, value in facts.items() if value not in (None, [])}


class LineWriter:
    """Writes lines to `out`, in order. `dropped`: lines that found no room."""

    def __init__(self, out: TextIO) -> None:
        self.dropped = 0
        self._out = out
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="paged-attn-log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Never waits."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what waits, for a second at most."""
        try:
            self._lines.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._out.write(line + "\n")
                if self._lines.empty():
                    self._out.flush()
            except (OSError, ValueError):  # the reader has gone, or the file was closed
                self.dropped += 1
