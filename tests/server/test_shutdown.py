"""The end of a server: nothing new is taken, what runs finishes or is told, and nothing is left."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest

from paged_attn.asynchronous.errors import Status
from paged_attn.engine.engine import Engine
from tests.engine.models import assert_idle, make_engine, oracle
from tests.server.serving import MODEL, PATIENCE, Running, chat_tokenizer, held, serving, wait_for
from tests.server.test_connections import HEAD, connect, read_all

BODY: dict[str, Any] = {"prompt": [4, 5, 6], "max_tokens": 100, "temperature": 0, "return_token_ids": True}


def post(running: Running, **changes: Any) -> httpx.Response:
    return running.http.post("/v1/completions", json={**BODY, **changes})


def one_at_a_time() -> Engine:
    return make_engine(tokenizer=chat_tokenizer(), max_requests=1)


def assert_ended(running: Running) -> None:
    running.thread.join(PATIENCE)
    assert not running.thread.is_alive()
    assert running.server.state.llm.thread.status is Status.STOPPED
    assert_idle(running.engine)
    assert running.engine.kv.allocator.num_free == running.engine.kv.num_usable, "the engine was closed"
    assert not running.server.state.llm.thread._thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{running.url}/health")


def test_a_body_that_is_still_coming_is_told_when_the_time_is_over(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(one_at_a_time, drain_seconds=0.5) as running, closing(connect(running)) as raw:
        raw.sendall(HEAD + b"Content-Length: 500\r\n\r\n{")
        wait_for(lambda: running.server.state.bodies._limits)
        running.stop()
        answer = read_all(raw)
        assert answer.startswith(b"HTTP/1.1 503") and b"the server ends, and 1 bytes of the body have come" in answer
        assert_ended(running)
    assert "Traceback" not in capfd.readouterr().err


def test_a_connection_that_was_being_accepted_when_the_time_was_over_is_told() -> None:
    """Uvicorn tells the connections that it has; one more would wait for an answer for ever."""
    with serving(one_at_a_time) as running:
        running.server.state.bodies.have_ended = True
        with closing(connect(running)) as raw:
            answer = read_all(raw)
        assert answer.startswith(b"HTTP/1.1 503") and b"the server ends; connect to another" in answer
        running.stop()
        assert_ended(running)


def test_what_runs_and_waits_finishes_and_nothing_new_is_taken() -> None:
    with (
        serving(lambda: make_engine(tokenizer=chat_tokenizer(), max_requests=1), drain_seconds=20.0) as running,
        ThreadPoolExecutor(2) as pool,
    ):
        with held(running.engine) as permits:
            stream = running.client.completions.create(model=MODEL, prompt=[4, 5, 6], max_tokens=100, temperature=0, stream=True)
            permits.release(2)
            waiting = pool.submit(post, running, prompt=[7, 8])
            wait_for(lambda: running.num_prompts == 2)
            running.stop()
            wait_for(lambda: running.http.get("/health/ready").status_code == 503)
            assert running.http.get("/health/live").status_code == 200, "it answers while it drains, on new connections, too"
            assert httpx.get(f"{running.url}/health").json() == {"status": "draining", "reason": "the engine is shutting down"}
            refused = post(running)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        text = "".join(chunk.choices[0].text for chunk in stream)
        assert text == chat_tokenizer().decode(oracle([4, 5, 6], 100))
        assert waiting.result().json()["choices"][0]["token_ids"] == oracle([7, 8], 100)
        assert_ended(running)


def test_after_drain_seconds_everyone_is_told() -> None:
    with (
        serving(lambda: make_engine(tokenizer=chat_tokenizer(), max_requests=1), drain_seconds=0.3) as running,
        ThreadPoolExecutor(2) as pool,
    ):
        with held(running.engine) as permits:
            permits.release(2)
            stream = iter(running.client.completions.create(model=MODEL, prompt=[4, 5, 6], max_tokens=100, temperature=0, stream=True))
            next(stream)
            waiting = pool.submit(post, running, prompt=[7, 8])
            wait_for(lambda: running.num_prompts == 2)
            running.stop()
            wait_for(lambda: running.server.state.llm.thread._everything is not None)
        with pytest.raises(openai.APIError, match="the engine was closed before the request was complete"):
            list(stream)
        reply = waiting.result()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
        assert_ended(running)


def test_an_idle_server_ends_at_once() -> None:
    with serving(drain_seconds=30.0) as running:
        assert post(running, max_tokens=2).status_code == 200
        started = time.monotonic()
        running.stop()
        assert_ended(running)
        assert time.monotonic() - started < 5


def test_a_forced_end_does_not_wait_for_clients() -> None:
    with serving(drain_seconds=30.0) as running, held(running.engine), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, running)
        wait_for(lambda: running.engine.has_work)
        started = time.monotonic()
        running.stop()
        wait_for(lambda: running.server.state.llm.thread.status is Status.DRAINING)
        running.server.force_exit = True  # as a second SIGINT does
        running.thread.join(PATIENCE)
        assert not running.thread.is_alive() and time.monotonic() - started < 10
        with contextlib.suppress(httpx.HTTPError):
            assert asked.result().status_code >= 500


def test_a_server_that_ends_while_it_loads_serves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_attn.server.state.STOP_SECONDS", 0.1)
    loading = threading.Event()

    def slow() -> Any:
        loading.wait(20)
        return make_engine()

    with serving(slow, wait=False) as running:
        wait_for(lambda: running.server.started)
        running.stop()
        running.thread.join(PATIENCE)
        assert not running.thread.is_alive()
        thread = running.server.state.llm.thread
        assert thread.status is Status.DRAINING
        loading.set()
        assert thread.stop(PATIENCE) and thread.status is Status.STOPPED
