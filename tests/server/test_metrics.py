"""GET /metrics: what Prometheus' own parser reads there agrees with what was run."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from paged_attn.server.logs.metrics import CountingHistogram
from tests.engine.models import make_engine
from tests.recurrent_models import recurrent
from tests.server.serving import Running, chat_tokenizer, held, serving, wait_for


def samples(running: Running) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    reply = running.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(reply.text)
    return {(s.name.removeprefix("paged_attn_"), tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_counts_of_requests_tokens_pages_and_steps() -> None:
    body: dict[str, Any] = {"prompt": [5] * 9, "max_tokens": 3, "temperature": 0}
    with serving(lambda: make_engine(tokenizer=chat_tokenizer()), max_queue=7) as running:
        for _ in range(2):
            assert running.http.post("/v1/completions", json=body).status_code == 200
        assert running.http.post("/v1/completions", json={**body, "best_of": 2}).status_code == 400
        running.http.get("/no/such/route")
        running.wait_idle()
        found = samples(running)
        assert found["requests_ended_total", (("outcome", "length"),)] == 2
        assert found["requests_ended_total", (("outcome", "error"),)] == 0
        assert found["prompt_tokens_total", ()] == 9 + 1 and found["cached_prompt_tokens_total", ()] == 8
        assert found["new_tokens_total", ()] == 6
        assert found["step_seconds_count", ()] == running.engine.stats.steps == 6 and found["step_seconds_sum", ()] > 0
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
            assert found[f"{name}_count", ()] == 2 and found[f"{name}_sum", ()] > 0
        assert found["inter_token_latency_seconds_count", ()] == 2 * (3 - 1) and found["inter_token_latency_seconds_sum", ()] > 0
        assert found["inter_token_latency_seconds_bucket", (("le", "+Inf"),)] == 4
        assert (found["request_prompt_tokens_sum", ()], found["request_generation_tokens_sum", ()]) == (18, 6)
        assert found["request_prompt_tokens_bucket", (("le", "5.0"),)] == 0 < found["request_prompt_tokens_bucket", (("le", "10.0"),)]
        assert found["kv_pages_total", ()] == running.engine.kv.num_usable == sum(v for (n, _), v in found.items() if n == "kv_pages")
        assert running.engine.kv.tree is not None
        assert found["kv_pages", (("state", "cached"),)] == running.engine.kv.tree.num_pages > 0
        assert found["queue_limit", ()] == 7 and found["ready", ()] == 1 and found["preemptions_total", ()] == 0
        assert found["http_responses_total", (("route", "/v1/completions"), ("status", "200"))] == 2
        assert found["http_responses_total", (("route", "/v1/completions"), ("status", "400"))] == 1
        assert found["http_responses_total", (("route", "other"), ("status", "404"))] == 1


def test_a_request_that_never_began_has_no_time_in_the_queue() -> None:
    with serving(lambda: make_engine(tokenizer=chat_tokenizer(), max_requests=1), queue_seconds=0.2) as running:
        with ThreadPoolExecutor(2) as pool, held(running.engine):
            body = {"prompt": [4, 5, 6], "max_tokens": 2}
            asked = [pool.submit(running.http.post, "/v1/completions", json=body) for _ in range(2)]
            wait_for(lambda: running.engine.has_work)
            time.sleep(0.3)
        assert sorted(each.result().status_code for each in asked) == [200, 503]
        found = samples(running)
        assert found["e2e_request_latency_seconds_count", ()] == 2 and found["request_queue_time_seconds_count", ()] == 1
        assert (found["request_prompt_tokens_count", ()], found["request_generation_tokens_sum", ()]) == (2, 2)


def test_equal_values_are_one_entry_each_in_their_bucket() -> None:
    histogram = CountingHistogram("a", "any", (0.5, 2))
    for value, count in ((0.5, 3), (0.6, 1), (9, 4)):
        histogram.observe(value, count)
    known = {(sample.name, sample.labels.get("le")): sample.value for sample in histogram.collect().samples}
    assert known == {("a_bucket", "0.5"): 3, ("a_bucket", "2.0"): 4, ("a_bucket", "+Inf"): 8, ("a_count", None): 8, ("a_sum", None): 38.1}


def test_snapshots_of_recurrent_state_and_what_was_computed_for_want_of_one() -> None:
    stem = list(range(5, 29))
    with serving(lambda: make_engine(recurrent("lfm2"), page_size=4)) as running:
        for more in ([40], [41], [42]):
            body = {"prompt": [*stem, *more, *[50] * 8], "max_tokens": 1, "temperature": 0}
            assert running.http.post("/v1/completions", json=body).status_code == 200
        running.wait_idle()
        found = samples(running)
        assert found["cached_prompt_tokens_total", ()] == 24, "the second one saw where they part, and kept the state for the third"
        assert found["stateless_prompt_tokens_total", ()] == 24
        assert found["state_snapshots", ()] == running.engine.kv.states.num_snapshots == 4  # where each ends, and where they part
        assert running.engine.state_pool is not None
        assert found["state_snapshot_bytes", ()] == 4 * running.engine.state_pool.slot_bytes
        slots = [found["state_slots", (("state", state),)] for state in ("used", "cached", "free")]
        assert slots == [0, 4, running.engine.state_pool.num_slots - 5]
        assert found["memory_bytes", (("kind", "pages"),)] == running.engine.pool.nbytes
        assert found["memory_bytes", (("kind", "states"),)] == running.engine.state_pool.nbytes
