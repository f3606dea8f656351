"""What GET /metrics tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paged_attn.asynchronous.snapshot import EngineSnapshot

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
WAIT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
PREFIX = "paged_attn_"


class ServerMetrics(Collector):
    """Histograms and counters of the server, and gauges of the engine at its last step."""

    def __init__(self, snapshot: Callable[[], EngineSnapshot], is_ready: Callable[[], bool], max_queue: int) -> None:
        self.registry = CollectorRegistry()
        self._snapshot, self._is_ready, self._max_queue = snapshot, is_ready, max_queue
        self._steps = self._histogram("step_seconds", "Wall time of engine steps", STEP_BUCKETS)
        self._first = self._histogram("first_token_seconds", "From a request's arrival to its first token", WAIT_BUCKETS)
        self._whole = self._histogram("request_seconds", "From a request's arrival to its end", WAIT_BUCKETS)
        self._failed = Counter(PREFIX + "failed_steps", "Engine steps that raised", registry=self.registry)
        self._ended = Counter(PREFIX + "requests_ended", "Requests that ended, by how", ["outcome"], registry=self.registry)
        self._http = Counter(PREFIX + "http_responses", "HTTP responses begun", ["route", "status"], registry=self.registry)
        for outcome in ("stop", "length", "cancelled", "error", "queue_timeout", "turned_away"):
            self._ended.labels(outcome)
        self.registry.register(self)

    def step(self, seconds: float) -> None:
        self._steps.observe(seconds)

    def step_failed(self) -> None:
        self._failed.inc()

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def ended(self, outcome: str, seconds: float) -> None:
        self._ended.labels(outcome).inc()
        self._whole.observe(seconds)

    def responded(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """The exposition format 0.0.4."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        requests = GaugeMetricFamily(PREFIX + "requests", "Requests in the engine now", labels=["state"])
        requests.add_metric(["running"], now.running)
        requests.add_metric(["waiting"], now.waiting)
        yield requests
        of_state = "KV pages by state: used by requests, cached for later ones and evicted when needed, free; windows may have left parts"
        pages = GaugeMetricFamily(PREFIX + "kv_pages", of_state, labels=["state"])
        pages.add_metric(["used"], now.pages_used)
        pages.add_metric(["cached"], now.pages_cached)
        pages.add_metric(["free"], now.pages_free)
        yield pages
        yield GaugeMetricFamily(PREFIX + "kv_pages_total", "KV pages that there is memory for, with all layers", value=now.pages_total)
        if now.pages_of:
            of_groups = "of layers with page tables of their own, by what these keep"
            group_pages = GaugeMetricFamily(PREFIX + "kv_group_pages", f"Pages in use {of_groups}", labels=["keeps"])
            group_bytes = GaugeMetricFamily(PREFIX + "kv_group_bytes", f"Bytes of the pages in use {of_groups}", labels=["keeps"])
            for keeps, (count, nbytes) in now.pages_of.items():
                group_pages.add_metric([keeps], count)
                group_bytes.add_metric([keeps], nbytes)
            yield group_pages
            yield group_bytes
        snapshots = "Recurrent states at the ends of cached prefixes"
        yield GaugeMetricFamily(PREFIX + "state_snapshots", snapshots, value=now.snapshots)
        yield GaugeMetricFamily(PREFIX + "state_snapshot_bytes", f"{snapshots}, in bytes", value=now.snapshot_bytes)
        slots = GaugeMetricFamily(PREFIX + "state_slots", "Slots of state: of requests, of cached prefixes, free", labels=["state"])
        slots.add_metric(["used"], now.slots_used)
        slots.add_metric(["cached"], now.snapshots)
        slots.add_metric(["free"], now.slots_total - now.slots_used - now.snapshots)
        yield slots
        memory = GaugeMetricFamily(PREFIX + "memory_bytes", "Memory for KV and recurrent states, by kind", labels=["kind"])
        memory.add_metric(["pages"], now.pool_bytes)
        memory.add_metric(["states"], now.state_bytes)
        yield memory
        yield GaugeMetricFamily(PREFIX + "queue_limit", "Requests that may wait", value=self._max_queue)
        yield GaugeMetricFamily(PREFIX + "ready", "1 while requests are served", value=int(self._is_ready()))
        for name, help, value in (
            ("prompt_tokens", "Prompt tokens computed", now.prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens taken from the prefix cache", now.cached_tokens),
            (
                "stateless_prompt_tokens",
                "Cached prompt tokens computed anew for want of a state",
                now.tokens_without_state,
            ),
            ("new_tokens", "Tokens generated", now.new_tokens),
            ("preemptions", "Requests that lost their pages and were recomputed", now.preemptions),
        ):
            yield CounterMetricFamily(PREFIX + name, help, value=value)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, help, buckets=buckets, registry=self.registry)
