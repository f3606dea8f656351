"""Steps that raise, logits that are not finite, an engine beyond use: those concerned are told why, the others go on."""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch

from paged_attn import SamplingParams
from paged_attn.asynchronous import async_llm
from paged_attn.asynchronous.errors import Status
from paged_attn.asynchronous.job import Job, Prompt
from tests.engine.models import POISON, fail_once, make_engine, oracle, poisoned
from tests.recurrent_models import recurrent
from tests.server.serving import MODEL, Running, chat_tokenizer, held, serving, wait_for

BODY: dict[str, Any] = {"prompt": [4, 5, 6], "max_tokens": 8, "temperature": 0, "return_token_ids": True}


def post(running: Running, **changes: Any) -> httpx.Response:
    return running.http.post("/v1/completions", json={**BODY, **changes})


def tokens(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


def test_a_failed_step_ends_what_ran_and_what_waited_goes_on() -> None:
    with serving(lambda: make_engine(tokenizer=chat_tokenizer(), max_requests=2)) as running, ThreadPoolExecutor(4) as pool:
        run, failed_once = running.engine.step_runner.run, threading.Event()

        def failing(*args: Any) -> Any:
            if len(running.engine.scheduler.running) == len(running.engine.scheduler.waiting) == 2 and not failed_once.is_set():
                failed_once.set()
                raise RuntimeError("the device coughed")
            return run(*args)

        running.engine.step_runner.run = failing  # type: ignore[method-assign]
        with held(running.engine) as permits:
            replies = []
            for number in range(4):  # the first runs alone in a step that waits; then two run and two wait
                replies.append(pool.submit(post, running, prompt=[4 + number, 5, 6]))
                wait_for(lambda n=number: running.num_prompts == n + 1 and running.engine.has_work)  # type: ignore[misc]
            permits.release(1)
            wait_for(lambda: running.metric("requests", 'state="waiting"') == 3)
        failed = [reply.result() for reply in replies[:2]]
        assert [reply.status_code for reply in failed] == [500, 500]
        assert failed[0].json()["error"] == {
            "message": "the step that ran this request failed: RuntimeError: the device coughed",
            "type": "server_error", "param": None, "code": "step_failed",
        }  # fmt: skip
        assert [tokens(reply.result()) for reply in replies[2:]] == [oracle([6, 5, 6], 8), oracle([7, 5, 6], 8)]
        running.wait_idle()
        assert running.http.get("/health").status_code == 200
        assert running.metric("failed_steps_total") == 1 and running.metric("requests_ended_total", 'outcome="error"') == 2
        assert tokens(post(running)) == oracle([4, 5, 6], 8)


def test_a_request_that_runs_but_was_not_in_the_step_that_failed_goes_on() -> None:
    """Two requests run until pages run out; the step that fails is the one for which the second was preempted."""
    prompts = [[4 + i, 5, 6, 7, 8, 9] for i in range(2)]
    make = functools.partial(make_engine, tokenizer=chat_tokenizer(), num_pages=14, prefix_cache=False)
    with serving(make) as running, ThreadPoolExecutor(2) as pool:
        run, failed = running.engine.step_runner.run, threading.Event()

        def failing(*args: Any) -> Any:
            if running.engine.scheduler.stats.preemptions and not failed.is_set():
                failed.set()
                raise RuntimeError("the device coughed")
            return run(*args)

        running.engine.step_runner.run = failing  # type: ignore[method-assign]
        with held(running.engine):
            replies = []
            for i, prompt in enumerate(prompts):
                replies.append(pool.submit(post, running, prompt=prompt, max_tokens=30))
                wait_for(lambda n=i: running.engine.has_work and running.num_prompts == n + 1)  # type: ignore[misc]
        assert replies[0].result().status_code == 500 and "the device coughed" in replies[0].result().text
        assert tokens(replies[1].result()) == oracle(prompts[1], 30)
        running.wait_idle()


def test_a_scheduler_that_raises_ends_what_runs_and_what_waits_goes_on() -> None:
    with serving(lambda: make_engine(tokenizer=chat_tokenizer(), max_requests=1)) as running, ThreadPoolExecutor(2) as pool:
        schedule, calls = running.engine.scheduler.schedule, iter(range(10**9))

        def failing(*args: Any, **settings: Any) -> Any:
            if next(calls) == 3:
                raise ZeroDivisionError("no share")
            return schedule(*args, **settings)

        running.engine.scheduler.schedule = failing  # type: ignore[method-assign]
        with held(running.engine):
            replies = [pool.submit(post, running)]
            wait_for(lambda: running.engine.has_work)
            replies.append(pool.submit(post, running, prompt=[7, 8]))
            wait_for(lambda: running.num_prompts == 2)
        assert replies[0].result().status_code == 500 and "ZeroDivisionError: no share" in replies[0].result().text
        assert tokens(replies[1].result()) == oracle([7, 8], 8)
        running.wait_idle()


def test_an_end_that_the_engine_never_tells_of_is_told_by_the_server() -> None:
    """A step fails and takes the last event of a request with it."""
    with serving() as running, ThreadPoolExecutor(2) as pool:
        step, calls = running.engine.step, iter(range(10**9))

        def failing() -> Any:
            events = step()
            if any(event.finish_reason for event in events) and next(calls) == 0:
                raise RuntimeError("events lost")
            return events

        running.engine.step = failing  # type: ignore[method-assign]
        replies = [pool.submit(post, running, prompt=[4 + i, 5, 6], max_tokens=4 + 4 * i) for i in range(2)]
        assert 500 in [reply.result().status_code for reply in replies]
        running.wait_idle()


def test_a_stream_that_fails_halfway_ends_with_the_error() -> None:
    with serving() as running:
        fail_once(running.engine, MemoryError("no room"), at_call=4)
        stream = running.client.completions.create(model=MODEL, prompt=[4, 5, 6], max_tokens=8, temperature=0, stream=True)
        with pytest.raises(openai.APIError, match="MemoryError: no room"):
            for _ in stream:
                pass
        with running.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as reply:
            assert list(reply.iter_lines())[-2:] == ["data: [DONE]", ""]
        running.wait_idle()


def test_what_ended_in_the_step_that_failed_keeps_its_answer() -> None:
    """Of three requests that sample their only token in one step the second raises; the first has ended."""
    with serving() as running, ThreadPoolExecutor(4) as pool:
        accept, calls = running.engine.output_processor.append_token, iter(range(10**9))

        def failing(*args: Any) -> Any:
            if next(calls) == 2:
                raise IndexError("no such piece")
            return accept(*args)

        running.engine.output_processor.append_token = failing  # type: ignore[method-assign]
        with held(running.engine):
            replies = [pool.submit(post, running, prompt=[7, 7], max_tokens=1)]
            wait_for(lambda: running.engine.has_work)
            for i in range(3):
                replies.append(pool.submit(post, running, prompt=[4 + i, 5], max_tokens=1))
                wait_for(lambda n=i: running.num_prompts == n + 2)  # type: ignore[misc]
        assert [reply.result().status_code for reply in replies] == [200, 200, 500, 500]
        assert tokens(replies[1].result()) == oracle([4, 5], 1)
        assert all("IndexError: no such piece" in reply.result().text for reply in replies[2:])
        running.wait_idle()
        assert tokens(post(running)) == oracle([4, 5, 6], 8)


def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    with serving() as running, ThreadPoolExecutor(3) as pool, poisoned():
        good = [pool.submit(post, running, prompt=[4 + i, 5, 6]) for i in range(2)]
        bad = post(running, prompt=[4, POISON])
        assert bad.status_code == 500 and "the model gave NaN or infinite logits" in bad.json()["error"]["message"]
        both = post(running, prompt=[[4, 5, 6], [4, POISON]])
        assert both.status_code == 500
        assert [tokens(reply.result()) for reply in good] == [oracle([4, 5, 6], 8), oracle([5, 5, 6], 8)]
        running.wait_idle()
        assert running.metric("failed_steps_total") == 0 and running.http.get("/health").status_code == 200


def test_an_engine_whose_steps_all_fail_is_reported_dead() -> None:
    with serving(lambda: make_engine(tokenizer=chat_tokenizer())) as running:

        def failing(*_: Any) -> Any:
            raise RuntimeError("the device is gone")

        running.engine.step_runner.run = failing  # type: ignore[method-assign]
        assert post(running).status_code == 500
        wait_for(lambda: running.http.get("/health").status_code == 503)
        health = running.http.get("/health").json()
        assert health["status"] == "dead" and "must be restarted: RuntimeError: the device is gone" in health["reason"]
        for stream in (False, True):
            reply = post(running, stream=stream)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "dead")
        assert running.metric("ready") == 0


def test_a_dead_engine_is_found_out_though_requests_never_cease() -> None:
    with serving(lambda: make_engine(tokenizer=chat_tokenizer())) as running:
        thread = running.server.state.llm.thread

        def failing(*_: Any) -> Any:
            if thread.status is Status.READY:
                thread.submit(Job([Prompt([4, 5])], [SamplingParams()]))
            raise RuntimeError("the device is gone")

        running.engine.step_runner.run = failing  # type: ignore[method-assign]
        assert post(running).status_code == 500
        wait_for(lambda: running.http.get("/health").status_code == 503)


def test_while_steps_fail_in_a_row_nothing_new_is_let_in_and_then_all_goes_on() -> None:
    with serving(lambda: make_engine(tokenizer=chat_tokenizer(), max_requests=1)) as running, ThreadPoolExecutor(6) as pool:
        run, calls = running.engine.step_runner.run, iter(range(10**9))

        def failing(*args: Any) -> Any:
            if next(calls) < 4:
                raise RuntimeError("for a while")
            return run(*args)

        running.engine.step_runner.run = failing  # type: ignore[method-assign]
        with held(running.engine):
            replies = [pool.submit(post, running, prompt=[4 + i, 5, 6]) for i in range(6)]
            wait_for(lambda: running.num_prompts == 6)
        statuses = sorted(reply.result().status_code for reply in replies)
        assert statuses.count(500) >= 3 and statuses.count(200) >= 1
        running.wait_idle()
        assert tokens(post(running)) == oracle([4, 5, 6], 8)


def test_a_model_with_recurrent_state_survives_failed_steps() -> None:
    model = recurrent("lfm2")
    with serving(lambda: make_engine(model)) as running:
        fail_once(running.engine, RuntimeError("once"))
        assert post(running, prompt=[[4, 5], [5, 6]]).status_code == 500
        running.wait_idle()
        assert tokens(post(running)) == oracle([4, 5, 6], 8, model)


@pytest.mark.parametrize("error", [ValueError("no model there"), torch.OutOfMemoryError("too large"), SystemExit(3)])
def test_a_model_that_can_not_be_loaded_ends_the_server_with_its_error(error: BaseException) -> None:
    def failing() -> Any:
        raise error

    with serving(failing, wait=False) as running:
        running.thread.join(10)
        assert not running.thread.is_alive() and running.server.fatal_error is error


def test_an_engine_that_does_not_recover_ends_the_server() -> None:
    """As one over several ranks, which cannot go on apart."""

    def make() -> Any:
        engine = make_engine(tokenizer=chat_tokenizer())
        engine.recovers = False
        return engine

    error = RuntimeError("the others are gone")
    with serving(make) as running:
        fail_once(running.engine, error)
        reply = post(running)
        assert reply.status_code == 500 and "the others are gone" in reply.text
        running.thread.join(10)
        assert not running.thread.is_alive() and running.server.fatal_error is error


def test_ready_is_said_once_requests_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waited for it was told that the model is loading: the tokenizers came after it."""
    said, texts = threading.Event(), async_llm.Texts
    monkeypatch.setattr(async_llm, "Texts", lambda *args: time.sleep(0.3) or texts(*args))
    with serving(on_ready=lambda engine: said.set(), wait=False) as running:
        assert said.wait(30)
        assert len(tokens(post(running))) == 8


def test_while_the_model_loads_health_says_so() -> None:
    loaded = threading.Event()

    def loading() -> Any:
        loaded.wait(20)
        return make_engine(tokenizer=chat_tokenizer())

    with serving(loading, wait=False) as running:
        wait_for(lambda: running.server.started)
        health = running.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading", "reason": "the model is loading"})
        reply = post(running)
        assert (reply.status_code, reply.headers["Retry-After"], reply.json()["error"]["code"]) == (503, "5", "loading")
        assert running.http.get("/metrics").status_code == 200 and running.http.get("/v1/models").status_code == 200
        loaded.set()
        wait_for(lambda: running.http.get("/health").status_code == 200)
        assert tokens(post(running)) == oracle([4, 5, 6], 8)


def test_a_step_whose_tokens_never_come_ends_its_own_requests_and_not_those_of_the_next() -> None:
    with serving(lambda: make_engine(tokenizer=chat_tokenizer(), overlap=True)) as running, ThreadPoolExecutor(2) as pool:
        choose, calls = running.engine.sampler.choose, iter(range(10**9))

        def waiting() -> Any:
            raise RuntimeError("the copy failed")

        def choosing(*args: Any) -> Any:
            chosen = choose(*args)
            if next(calls) == 0:
                chosen.wait = waiting
            return chosen

        running.engine.sampler.choose = choosing  # type: ignore[method-assign]
        with held(running.engine):
            replies = [pool.submit(post, running)]
            wait_for(lambda: running.engine.has_work)
            replies.append(pool.submit(post, running, prompt=[7, 8]))
            wait_for(lambda: running.num_prompts == 2)
        assert replies[0].result().status_code == 500 and "the copy failed" in replies[0].result().text
        assert tokens(replies[1].result()) == oracle([7, 8], 8)
        running.wait_idle()
