"""The API key, the size of bodies, the length of the queue."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from paged_attn.server.settings import ServerSettings
from tests.engine.models import make_engine, oracle
from tests.server.serving import MODEL, Running, chat_tokenizer, held, serving, wait_for

BODY: dict[str, Any] = {"prompt": [4, 5, 6], "max_tokens": 4, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with serving(api_keys=("secret", "other"), max_body_mib=0.001) as running:
        yield running


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}, {"Authorization": "Bearer"}])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/nothing", "/tokenizer_info"])
def test_without_the_key_v1_is_closed(guarded: Running, header: dict[str, str], path: str) -> None:
    method = "GET" if path in ("/v1/models", "/tokenizer_info") else "POST"
    reply = guarded.http.request(method, path, headers={"Authorization": "", **header})
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert reply.headers["WWW-Authenticate"] == "Bearer" and "secret" not in reply.text


def test_either_key_opens_and_health_and_metrics_need_none(guarded: Running) -> None:
    for key in ("secret", "other"):
        with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as client:
            assert client.models.list().data[0].id == MODEL
            assert client.completions.create(model=MODEL, prompt="Hi", max_tokens=1).choices
    with pytest.raises(openai.AuthenticationError, match="not known"), openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="x") as client:
        client.models.list()
    for path in ("/health", "/metrics"):
        assert guarded.http.get(path, headers={"Authorization": ""}).status_code == 200


def test_a_body_beyond_the_limit_gets_413_declared_or_not(guarded: Running) -> None:
    large = b'{"prompt": "' + b"a" * 2000 + b'"}'

    def parts() -> Iterator[bytes]:
        yield from (large[i : i + 100] for i in range(0, len(large), 100))

    for content in (large, parts()):
        reply = guarded.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
        assert "this server takes 0.000999451 MiB" in reply.json()["error"]["message"]
    assert guarded.http.post("/v1/completions", json=BODY).status_code == 200


def test_answers_do_not_wait_for_delayed_acks(guarded: Running) -> None:
    """Without TCP_NODELAY each would take 40 ms."""
    taken = []
    for _ in range(20):
        started = time.perf_counter()
        guarded.http.post("/v1/completions", json={"prompt": []})
        taken.append(time.perf_counter() - started)
    assert min(taken[1:]) < 0.03


def test_beyond_the_queue_requests_get_429_and_none_is_lost() -> None:
    with serving(lambda: make_engine(tokenizer=chat_tokenizer(), max_requests=2), max_queue=3) as running, ThreadPoolExecutor(8) as pool:
        with held(running.engine) as permits:
            posts = []
            for number in range(5):  # two run, three wait
                posts.append(pool.submit(running.http.post, "/v1/completions", json={**BODY, "prompt": [4 + number, 5]}))
                wait_for(lambda n=number: running.num_prompts == n + 1 and running.engine.has_work)  # type: ignore[misc]
            reply = running.http.post("/v1/completions", json=BODY)
            assert reply.status_code == 429 and reply.headers["Retry-After"] == "1"
            assert (
                reply.json()["error"]["type"] == "rate_limit_error"
                and "at most 3 may wait beyond 2 that run" in reply.json()["error"]["message"]
            )
            with pytest.raises(openai.RateLimitError):
                running.client.completions.create(model=MODEL, prompt="a", stream=True)
            permits.release(1)
        got = [post.result().json()["choices"][0]["token_ids"] for post in posts]
        assert got == [oracle([4 + n, 5], 4) for n in range(5)]
        running.wait_idle()
        assert running.http.post("/v1/completions", json=BODY).status_code == 200
        running.wait_idle()  # the reply comes before the engine's place is seen to be free
        many = running.http.post("/v1/completions", json={**BODY, "prompt": [[4]] * 6})
        assert many.status_code == 400 and "6 prompts in one request; this server takes at most 5: 2 that run" in many.text
        assert len(running.http.post("/v1/completions", json={**BODY, "prompt": [[4]] * 5}).json()["choices"]) == 5


def test_an_urgent_request_comes_first_where_that_is_allowed() -> None:
    ended: list[str] = []
    engine = functools.partial(make_engine, tokenizer=chat_tokenizer(), max_requests=1)
    with serving(engine, allow_priority=True) as running, ThreadPoolExecutor(4) as pool:

        def ask(name: str, **more: Any) -> Any:
            reply = running.http.post("/v1/completions", json={**BODY, **more})
            ended.append(name)
            return reply.json()["choices"][0]["token_ids"]

        with held(running.engine):
            asked = []
            for number, (name, priority) in enumerate({"first": 0, "later": None, "urgent": -1, "idle": 7}.items()):
                asked.append(pool.submit(ask, name, priority=priority))
                wait_for(lambda n=number: running.num_prompts == n + 1 and running.engine.has_work)  # type: ignore[misc]
        assert [each.result() for each in asked] == [oracle(BODY["prompt"], 4)] * 4
        assert ended.index("urgent") < ended.index("later") < ended.index("idle")
    with serving(engine) as running:
        refused = running.http.post("/v1/completions", json={**BODY, "priority": -1})
        assert refused.status_code == 400 and "--allow-priority" in refused.text and refused.json()["error"]["param"] == "priority"
        assert running.http.post("/v1/completions", json={**BODY, "priority": 0}).status_code == 200


def test_a_queue_of_0_lets_in_what_can_run() -> None:
    with serving(lambda: make_engine(max_requests=1), max_queue=0) as running:
        assert running.http.post("/v1/completions", json=BODY).status_code == 200
        running.wait_idle()
        with ThreadPoolExecutor(1) as pool, held(running.engine):
            first = pool.submit(running.http.post, "/v1/completions", json=BODY)
            wait_for(lambda: running.engine.has_work)
            assert running.http.post("/v1/completions", json=BODY).status_code == 429
        assert first.result().status_code == 200


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"model_name": ""}, "model_name is empty"),
        ({"port": 65536}, "port is 65536; allowed are 0"),
        ({"max_queue": -1}, "max_queue is -1"),
        ({"max_body_mib": 0}, "max_body_mib is 0"),
        ({"max_body_mib": float("nan")}, "max_body_mib is nan"),
        ({"drain_seconds": -1}, "drain_seconds is -1"),
        ({"otlp_endpoint": "localhost:4318"}, "otlp_endpoint is 'localhost:4318'; allowed is a URL"),
        ({"otlp_endpoint": "http://host:http/v1/traces"}, "otlp_endpoint is"),
        ({"allow_origins": ("*", "example.com")}, "allow_origins has 'example.com'; allowed are origins"),
        ({"allow_origins": ("https://example.com/",)}, "allow_origins has"),
        ({"allow_hosts": ("https://example.com",)}, "allow_hosts has 'https://example.com'; allowed are names"),
        ({"allow_hosts": ("example.com:8000",)}, "allow_hosts has"),
        ({"api_keys": ("",)}, "an API key is empty"),
        ({"api_keys": ("a b",)}, "an API key"),
        ({"api_keys": ("ä",)}, "printable ASCII"),
    ],
)
def test_settings_out_of_range_are_named(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServerSettings(**{"model_name": "m", **bad})


def test_origins_and_hosts_as_browsers_send_them() -> None:
    origins = ("*", "null", "https://example.com", "http://[::1]:3000", "chrome-extension://abcdefgh", "tauri://localhost")
    hosts = ("example.com", "*.example.com", "localhost", "127.0.0.1", "[::1]", "my_service")
    settings = ServerSettings("m", allow_origins=origins, allow_hosts=hosts, otlp_endpoint="http://localhost:4318/v1/traces")
    assert settings.allow_origins == origins and settings.allow_hosts == hosts
