"""OpenTelemetry: a span for each request, in the trace that its client names (W3C traceparent). Needs the extra `otel`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from paged_attn.attn_ops.install_line import install_line
from paged_attn.server.http.call import Call

# From facts of a request to the names of OpenTelemetry's conventions for generative AI and HTTP.
_ATTRIBUTES = {
    "request_id": "http.request.header.x-request-id", "method": "http.request.method", "path": "url.path", "client": "client.address",
    "status": "http.response.status_code", "error": "error.type", "answers": "gen_ai.request.choice.count",
    "finish_reasons": "gen_ai.response.finish_reasons", "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens", "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "first_token_seconds": "gen_ai.server.time_to_first_token",
}  # fmt: skip


class Tracing:
    """Makes spans.

    Args:
        provider: an OpenTelemetry `TracerProvider`; it is this object's, and shut down with it.
        model_name: as clients know it.
    """

    def __init__(self, provider: Any, model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model_name = provider, model_name
        self._tracer = provider.get_tracer("paged_attn")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str, model_name: str) -> Tracing:
        """Sends spans over OTLP and HTTP, in a thread of its own. Raises ValueError: the extra is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            what = f"otlp_endpoint needs OpenTelemetry, which is not installed ({error.name})"
            raise ValueError(f"{what}: {install_line('otel')}") from error
        # Not OpenTelemetry's global one: FastAPI would make spans of its own.
        provider = TracerProvider(resource=Resource.create({"service.name": "paged_attn"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider, model_name)

    def record(self, call: Call, facts: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """A span for a request that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        known = {name: facts[fact] for fact, name in _ATTRIBUTES.items() if fact in facts}
        known |= {"gen_ai.request.model": self._model_name} if call.job is not None else {}
        parent = self._propagator.extract(dict(headers))
        name = f"{facts['method']} {facts['path']}"
        span = self._tracer.start_span(name, context=parent, kind=SpanKind.SERVER, attributes=known, start_time=call.began)
        if facts["status"] >= 500 or "error" in facts:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=time.time_ns())

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()
