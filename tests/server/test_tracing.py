"""OpenTelemetry: a span for each request, in the trace that its client says."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paged_attn.server.logs.tracing import Tracing
from paged_attn.server.settings import ServerSettings
from paged_attn.server.state import ServerState
from tests.server.serving import MODEL, serving

BODY: dict[str, Any] = {"prompt": [4, 5, 6], "max_tokens": 4}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_request_is_a_span_of_its_clients_trace() -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with serving(tracing=Tracing(provider, MODEL)) as running:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "mine"}
        assert running.http.post("/v1/completions", json=BODY, headers=headers).status_code == 200
        assert running.http.post("/v1/completions", json={**BODY, "prompt": []}).status_code == 400
        running.http.get("/health")
    good, bad = spans.get_finished_spans()
    assert good.name == "POST /v1/completions" and good.status.is_ok is not False
    assert good.context is not None and good.parent is not None and bad.parent is None
    assert f"{good.context.trace_id:x}" == TRACE[1:] and f"{good.parent.span_id:x}" == SPAN
    known = dict(good.attributes or {})
    assert known["gen_ai.request.model"] == MODEL and known["http.response.status_code"] == 200
    assert (known["gen_ai.usage.input_tokens"], known["gen_ai.usage.output_tokens"]) == (3, 4)
    assert known["gen_ai.response.finish_reasons"] == ("length",) and known["http.request.header.x-request-id"] == "mine"
    assert good.end_time is not None and good.start_time is not None and good.end_time > good.start_time
    assert not bad.status.is_ok and dict(bad.attributes or {})["error.type"] == "invalid_request_error"


def test_spans_go_where_they_are_said_to_go() -> None:
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        with serving(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}/v1/traces") as running:
            assert running.http.post("/v1/completions", json=BODY).status_code == 200
        collector.shutdown()
    request = ExportTraceServiceRequest.FromString(received[0])
    (span,) = request.resource_spans[0].scope_spans[0].spans
    assert span.name == "POST /v1/completions" and "gen_ai.usage.output_tokens" in {each.key for each in span.attributes}


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    settings = ServerSettings(MODEL, otlp_endpoint="http://localhost:4318/v1/traces")
    with pytest.raises(ValueError, match=r"otlp_endpoint needs OpenTelemetry, .*: pip install .*\[otel\]'"):
        ServerState(lambda: pytest.fail("no engine is made"), settings)
