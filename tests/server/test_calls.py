"""Ids, lines of the log, deadlines, time in the queue, and ends by id."""

from __future__ import annotations

import functools
import io
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from paged_attn.server import state
from paged_attn.server.logs.call_log import LineWriter
from tests.engine.models import POISON, make_engine, oracle, poisoned
from tests.server.serving import MODEL, Running, chat_tokenizer, held, serving, wait_for

BODY: dict[str, Any] = {"prompt": [4, 5, 6], "max_tokens": 4, "temperature": 0, "return_token_ids": True}


def post(running: Running, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
    return running.http.post("/v1/completions", json={**BODY, **changes}, headers=headers)


@pytest.mark.parametrize("given", ["abc-123", "x" * 128, "~! a{}"])
def test_the_clients_own_id_comes_back(running: Running, given: str) -> None:
    for path, method in (("/v1/completions", "POST"), ("/health", "GET"), ("/nothing", "GET")):
        reply = running.http.request(method, path, json=BODY, headers={"x-request-id": given})
        assert reply.headers["x-request-id"] == given
    with running.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}, headers={"x-request-id": given}) as reply:
        assert reply.headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "x" * 129, "ü".encode(), b"a\tb", ""])
def test_who_has_no_good_id_gets_one(running: Running, given: Any) -> None:
    headers = {} if given is None else {"x-request-id": given}
    ids = {post(running, headers, **bad).headers["x-request-id"] for bad in ({}, {"prompt": []}, {"n": 0})}
    assert len(ids) == 3 and all(len(each) == 32 and each.isalnum() for each in ids)


def logged(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_each_request_has_one_line_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(state.sys, "stdout", out)
    make = functools.partial(make_engine, tokenizer=chat_tokenizer())
    with serving(make, log_requests=True, api_keys=("secret",)) as running, poisoned():
        monkeypatch.undo()
        ids = {"x-request-id": "mine"}

        def then(count: int) -> None:
            wait_for(lambda: len(logged(out)) == count)  # a line may come after its answer

        assert post(running, ids, prompt=[[7] * 9, [8, 9]], n=2).status_code == 200
        then(1)
        assert post(running, prompt=[7] * 9).status_code == 200
        then(2)
        list(running.client.completions.create(model=MODEL, prompt="Hi", max_tokens=3, temperature=0, stream=True))
        then(3)
        assert post(running, stop=1).status_code == 400
        then(4)
        assert post(running, {"Authorization": "none"}).status_code == 401
        then(5)
        assert post(running, prompt=[5, POISON]).status_code == 500
        then(6)
        with running.http.stream("POST", "/v1/completions", json={**BODY, "prompt": [5, POISON], "stream": True}) as reply:
            reply.read()
        then(7)
        assert running.http.get("/v1/models").status_code == 200 and running.http.get("/health").status_code == 200
    lines = logged(out)
    assert [line["status"] for line in lines] == [200, 200, 200, 400, 401, 500, 200, 200], "and none for /health"
    first, second, stream, bad, stranger, failed, failed_stream, models = lines
    assert first | {"time": 0, "seconds": 0, "first_token_seconds": 0} == {
        "time": 0, "request_id": "mine", "client": "127.0.0.1", "key": "key-1", "method": "POST", "path": "/v1/completions", "status": 200,
        "seconds": 0, "prompts": 2, "answers": 4, "finish_reasons": ["length"], "prompt_tokens": 11, "cached_tokens": 0,
        "completion_tokens": 16, "first_token_seconds": 0,
    }  # fmt: skip
    assert 0 < first["first_token_seconds"] <= first["seconds"] < 20 and second["cached_tokens"] == 8
    assert (stream["prompt_tokens"], stream["completion_tokens"], stream["finish_reasons"]) == (2, 3, ["length"])
    assert bad["error"] == "invalid_request_error" and "key" in bad and "prompt_tokens" not in bad
    assert stranger["error"] == "invalid_api_key" and "key" not in stranger and "secret" not in out.getvalue()
    assert failed["error"] == failed_stream["error"] == "bad_logits" and failed["finish_reasons"] == ["error"]
    assert models["path"] == "/v1/models" and "error" not in models


def test_a_client_that_left_is_in_the_log_too(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(state.sys, "stdout", out)
    with serving(log_requests=True) as running, held(running.engine):
        monkeypatch.undo()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.url}/v1/completions", json=BODY, timeout=0.3)
        wait_for(lambda: bool(out.getvalue()))
    (line,) = logged(out)
    assert line["status"] == 499


def test_a_reader_of_the_log_that_stops_reading_stops_nothing() -> None:
    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            stuck.set()
            go_on.wait(20)
            return super().write(text)

    stuck, go_on, out = threading.Event(), threading.Event(), Stuck()
    writer = LineWriter(out)
    writer._lines.maxsize = 5
    started = time.monotonic()
    for number in range(20):
        writer.write(str(number))
        stuck.wait(20)
    assert time.monotonic() - started < 1 and writer.dropped == 14
    go_on.set()
    writer.close()
    assert out.getvalue().splitlines() == [str(number) for number in range(6)]


@pytest.mark.parametrize("by", ["client", "server", "both"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_at_its_deadline(by: str, stream: bool) -> None:
    settings = {"request_seconds": {"server": 0.5, "both": 60.0}[by]} if by != "client" else {}
    body = {**BODY, "max_tokens": 200, "stream": stream, **({} if by == "server" else {"timeout_seconds": 0.5})}
    with serving(**settings) as running:
        with held(running.engine) as permits:
            permits.release(3)
            started = time.monotonic()
            reply = running.http.post("/v1/completions", json=body)
            assert 0.4 < time.monotonic() - started < 5
        error = json.loads(reply.text.split("data: ")[-2]) if stream else reply.json()
        assert error["error"]["code"] == "request_timeout" and "did not end within 0.5 s" in error["error"]["message"]
        assert reply.status_code == (200 if stream else 504)
        assert stream or reply.headers["x-should-retry"] == "false", "OpenAI's clients do not send it again"
        running.wait_idle()
        assert running.engine.stats.new_tokens < 10
        assert post(running, timeout_seconds=20).json()["choices"][0]["token_ids"] == oracle([4, 5, 6], 4)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), True, "5"])
def test_a_deadline_that_is_none_is_refused(running: Running, bad: Any) -> None:
    reply = running.http.post(
        "/v1/completions", content=json.dumps({**BODY, "timeout_seconds": bad}), headers={"Content-Type": "application/json"}
    )
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "timeout_seconds")


def test_who_waits_for_too_long_is_told_and_who_runs_goes_on() -> None:
    make = functools.partial(make_engine, tokenizer=chat_tokenizer(), max_requests=1)
    with serving(make, queue_seconds=0.4) as running, ThreadPoolExecutor(3) as pool:
        with held(running.engine) as permits:
            first = pool.submit(post, running, max_tokens=30)
            wait_for(lambda: running.engine.has_work)
            late = [pool.submit(post, running, prompt=[9, 9]) for _ in range(2)]
            wait_for(lambda: running.num_prompts == 3)
            time.sleep(0.5)
            permits.release(2)
            replies = [each.result() for each in late]
        assert ([reply.status_code for reply in replies] == [503] * 2 and not first.done()) or first.result().status_code == 200
        assert replies[0].json()["error"]["code"] == "queue_timeout" and replies[0].headers["Retry-After"] == "5"
        assert first.result().json()["choices"][0]["token_ids"] == oracle([4, 5, 6], 30)
        running.wait_idle()
        assert running.metric("requests_ended_total", 'outcome="queue_timeout"') == 2


def cancel(running: Running, id: str, key: str = "none") -> httpx.Response:
    return running.http.post(f"/v1/requests/{quote(id, safe='')}/cancel", headers={"Authorization": f"Bearer {key}"})


def test_requests_are_ended_by_their_id_wherever_they_are() -> None:
    make = functools.partial(make_engine, tokenizer=chat_tokenizer(), max_requests=1)
    with serving(make) as running, ThreadPoolExecutor(4) as pool:
        with held(running.engine) as permits:
            runs = pool.submit(post, running, {"x-request-id": "runs"}, max_tokens=200)
            wait_for(lambda: running.engine.has_work)
            waits = [pool.submit(post, running, {"x-request-id": "waits/for it?"}, prompt=[7]) for _ in range(2)]
            other = pool.submit(post, running, {"x-request-id": "other"}, prompt=[8, 9])
            wait_for(lambda: running.num_prompts == 4)
            permits.release(2)
            wait_for(lambda: running.metric("requests", 'state="waiting"') == 3)
            assert cancel(running, "waits/for it?").json() == {"id": "waits/for it?", "cancelled": 2}
            assert [each.result().status_code for each in waits] == [499, 499]
            assert waits[0].result().json()["error"]["code"] == "cancelled"
            assert cancel(running, "runs").json() == {"id": "runs", "cancelled": 1} and runs.result().status_code == 499
            assert cancel(running, "runs").status_code == 404
        assert other.result().json()["choices"][0]["token_ids"] == oracle([8, 9], 4)
        with running.http.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 250, "stream": True}) as reply:
            parts = reply.iter_lines()
            next(parts)
            assert cancel(running, reply.headers["x-request-id"]).json()["cancelled"] == 1
            assert json.loads([line for line in parts if line][-2].removeprefix("data: "))["error"]["code"] == "cancelled"
        running.wait_idle()
        assert running.metric("requests_ended_total", 'outcome="cancelled"') == 4 and len(running.server.state.calls) == 0


def test_nobody_ends_the_requests_of_another_key() -> None:
    with serving(api_keys=("alice", "bob")) as running, ThreadPoolExecutor(1) as pool:
        with held(running.engine):
            hers = pool.submit(post, running, {"x-request-id": "one", "Authorization": "Bearer alice"})
            wait_for(lambda: running.engine.has_work)
            stranger = cancel(running, "one", "bob")
            assert stranger.status_code == 404 and "no request 'one' of this key under way" in stranger.json()["error"]["message"]
            assert cancel(running, "one", "carol").status_code == 401
        assert hers.result().status_code == 200


def test_a_key_has_so_many_at_a_time_and_so_many_a_minute() -> None:
    make = functools.partial(make_engine, tokenizer=chat_tokenizer())
    with serving(make, api_keys=("alice", "bob"), max_requests_per_key=2, requests_per_minute_per_key=5) as running:
        headers = {"Authorization": "Bearer alice"}
        with ThreadPoolExecutor(2) as pool, held(running.engine):
            two = [pool.submit(post, running, headers) for _ in range(2)]
            wait_for(lambda: running.num_prompts == 2)
            third = post(running, headers)
            assert (third.status_code, third.json()["error"]["code"]) == (429, "too_many_requests")
            assert cancel(running, "nothing", "alice").status_code == 404, "that is not a request that runs"
        assert [each.result().status_code for each in two] == [200, 200]
        assert [post(running, headers).status_code for _ in range(3)] == [200, 200, 429]
        late = post(running, headers)
        assert late.json()["error"]["code"] == "rate_limited" and 1 <= int(late.headers["Retry-After"]) <= 12
        assert post(running, {"Authorization": "Bearer bob"}).status_code == 200


def test_what_nobody_foresaw_is_told_to_the_log_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("paged_attn"), "propagate", True)
    with serving() as running:

        def broken(*_: Any) -> Any:
            raise RuntimeError("the password is 1234\nTraceback (most recent call last):\n  File x")

        monkeypatch.setattr(type(running.server.state.calls), "enter", broken)
        for _ in range(2):  # the connection is as good as before
            reply = post(running, {"x-request-id": "mine"})
        assert reply.status_code == 500 and reply.headers["x-request-id"] == "mine"
        assert "1234" not in reply.text and "RuntimeError; its log says why" in reply.text
        assert "1234" in caplog.text and "the request mine failed" in caplog.text
        monkeypatch.undo()
        assert post(running).status_code == 200


def test_the_backtrace_of_a_step_that_failed_stays_here() -> None:
    with serving() as running:
        run, calls = running.engine.step_runner.run, iter(range(10**6))

        def failing(*args: Any) -> Any:
            if next(calls) == 0:
                raise RuntimeError("no kernel\nException raised from launch at /build/x.cu:1 (most recent call first):\nframe #0: c10")
            return run(*args)

        running.engine.step_runner.run = failing  # type: ignore[method-assign]
        error = post(running).json()["error"]
        assert error["message"] == "the step that ran this request failed: RuntimeError: no kernel"
        running.wait_idle()
