"""GET /metrics, for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from paged_attn.asynchronous.snapshot import EndedRequest, EngineSnapshot, Observer

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
WAIT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5)) + (10**6,)
PREFIX = "paged_attn_"


class ServerMetrics(Collector, Observer):
    """Histograms and counters of the server, and gauges of the engine at its last step. Histograms of requests have vLLM's names."""

    def __init__(self, snapshot: Callable[[], EngineSnapshot], is_ready: Callable[[], bool], max_queue: int) -> None:
        self.registry = CollectorRegistry()
        self._snapshot, self._is_ready, self._max_queue = snapshot, is_ready, max_queue
        self._steps = self._histogram("step_seconds", "Wall time of engine steps", STEP_BUCKETS)
        self._first = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token", WAIT_BUCKETS)
        self._queued = self._histogram("request_queue_time_seconds", "From a request's arrival to its first step", WAIT_BUCKETS)
        self._whole = self._histogram("e2e_request_latency_seconds", "From a request's arrival to its end", WAIT_BUCKETS)
        self._prompts = self._histogram("request_prompt_tokens", "Prompt tokens of requests that ended", TOKEN_BUCKETS)
        self._answers = self._histogram("request_generation_tokens", "New tokens of requests that ended", TOKEN_BUCKETS)
        between = "From a token of a request to the next one"
        self._later = CountingHistogram(PREFIX + "inter_token_latency_seconds", between, STEP_BUCKETS)
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

    def later_tokens(self, seconds: float, count: int) -> None:
        self._later.observe(seconds, count)

    def ended(self, request: EndedRequest) -> None:
        self._ended.labels(request.outcome).inc()
        self._whole.observe(request.seconds)
        self._prompts.observe(request.prompt_tokens)
        self._answers.observe(request.new_tokens)
        if request.queue_seconds is not None:
            self._queued.observe(request.queue_seconds)

    def responded(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """The exposition format 0.0.4."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        yield self._later.collect()
        yield _gauge("requests", "Requests in the engine now", "state", {"running": now.running, "waiting": now.waiting})
        of_state = "KV pages by state: used by requests, cached for later ones and evicted when needed, free; windows may have left parts"
        yield _gauge("kv_pages", of_state, "state", {"used": now.pages_used, "cached": now.pages_cached, "free": now.pages_free})
        yield GaugeMetricFamily(PREFIX + "kv_pages_total", "KV pages that there is memory for, with all layers", value=now.pages_total)
        if now.pages_of:
            of_groups = "of layers with page tables of their own, by what these keep"
            counts, sizes = ({keeps: both[index] for keeps, both in now.pages_of.items()} for index in (0, 1))
            yield _gauge("kv_group_pages", f"Pages in use {of_groups}", "keeps", counts)
            yield _gauge("kv_group_bytes", f"Bytes of the pages in use {of_groups}", "keeps", sizes)
        snapshots = "Recurrent states at the ends of cached prefixes"
        yield GaugeMetricFamily(PREFIX + "state_snapshots", snapshots, value=now.snapshots)
        yield GaugeMetricFamily(PREFIX + "state_snapshot_bytes", f"{snapshots}, in bytes", value=now.snapshot_bytes)
        free_slots = now.slots_total - now.slots_used - now.snapshots
        slots = {"used": now.slots_used, "cached": now.snapshots, "free": free_slots}
        yield _gauge("state_slots", "Slots of state: of requests, of cached prefixes, free", "state", slots)
        memory = {"pages": now.pool_bytes, "states": now.state_bytes}
        yield _gauge("memory_bytes", "Memory for KV and recurrent states, by kind", "kind", memory)
        yield GaugeMetricFamily(PREFIX + "queue_limit", "Requests that may wait", value=self._max_queue)
        yield GaugeMetricFamily(PREFIX + "ready", "1 while requests are served", value=int(self._is_ready()))
        for name, help, value in (
            ("prompt_tokens", "Prompt tokens computed", now.prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens taken from the prefix cache", now.cached_tokens),
            ("stateless_prompt_tokens", "Cached prompt tokens recomputed for lack of a state", now.tokens_without_state),
            ("new_tokens", "Tokens generated", now.new_tokens),
            ("preemptions", "Requests that lost their pages and were recomputed", now.preemptions),
        ):
            yield CounterMetricFamily(PREFIX + name, help, value=value)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, help, buckets=buckets, registry=self.registry)


def _gauge(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    """One number for each value of a label."""
    gauge = GaugeMetricFamily(PREFIX + name, help, labels=[label])
    for of, value in values.items():
        gauge.add_metric([of], value)
    return gauge


class CountingHistogram:
    """Takes many equal values at once: prometheus_client's own takes them one by one, and a step has hundreds of tokens. Written by one
    thread, and read by any. `buckets`: their upper bounds, ascending; one of all that is larger comes last."""

    def __init__(self, name: str, help: str, buckets: Sequence[float]) -> None:
        self._name, self._help, self._bounds = name, help, [*buckets, float("inf")]
        self._counts, self._sum = [0] * len(self._bounds), 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Metric:
        """The current values, in Prometheus' format."""
        totals = zip(map(floatToGoString, self._bounds), map(float, accumulate(self._counts)), strict=True)
        return HistogramMetricFamily(self._name, self._help, buckets=list(totals), sum_value=self._sum)
