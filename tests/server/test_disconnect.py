"""Clients that leave: their requests end at once and hold nothing, wherever they are."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from starlette.types import Message

from paged_attn import SamplingParams
from paged_attn.asynchronous.job import Job, Prompt
from paged_attn.server.http.disconnect import PIECE, EventStream
from tests.engine.models import make_engine, oracle, random_prompts
from tests.server.serving import MODEL, Running, chat_tokenizer, held, serving, wait_for

BODY: dict[str, Any] = {"prompt": [4, 5, 6], "max_tokens": 200, "temperature": 0}


@pytest.fixture(scope="module")
def narrow() -> Iterator[Running]:
    """One request runs, the others wait."""
    with serving(lambda: make_engine(tokenizer=chat_tokenizer(), max_requests=1)) as running:
        yield running


def test_a_stream_that_is_closed_frees_its_pages(narrow: Running) -> None:
    before = narrow.metric("requests_ended_total", 'outcome="cancelled"')
    with held(narrow.engine) as permits:
        permits.release(3)
        stream = narrow.client.completions.create(model=MODEL, prompt=[4, 5, 6], max_tokens=200, temperature=0, stream=True)
        parts = iter(stream)  # kept: at its end it would close the stream
        next(parts)
        wait_for(lambda: narrow.metric("kv_pages", 'state="used"') > 0)
        stream.close()
        wait_for(lambda: bool(narrow.server.state.llm.thread._cancels) or not narrow.engine.has_work)
    narrow.wait_idle()
    assert narrow.metric("requests_ended_total", 'outcome="cancelled"') == before + 1
    assert narrow.engine.stats.new_tokens < 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_waits_never_runs(narrow: Running, stream: bool) -> None:
    wanted = oracle([7, 8], 6)
    with held(narrow.engine) as permits:
        got: list[Any] = []
        body = {"prompt": [7, 8], "max_tokens": 6, "temperature": 0, "return_token_ids": True}
        first = threading.Thread(target=lambda: got.append(narrow.http.post("/v1/completions", json=body)))
        first.start()
        wait_for(lambda: narrow.engine.has_work)
        threads = [threading.Thread(target=leave, args=(narrow, {**BODY, "stream": stream})) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_for(lambda: narrow.num_prompts == 4)
        permits.release(1)
        wait_for(lambda: narrow.metric("requests", 'state="waiting"') == 3)
        for thread in threads:
            thread.join()
        wait_for(lambda: len(narrow.server.state.llm.thread._cancels) == 3)
        permits.release(1)
        wait_for(lambda: narrow.metric("requests", 'state="waiting"') == 0)
    first.join()
    narrow.wait_idle()
    assert got[0].json()["choices"][0]["token_ids"] == wanted


def leave(running: Running, body: dict[str, Any]) -> None:
    """Ask, and hang up when nothing comes for a while."""
    with httpx.Client(base_url=running.url, timeout=1.0) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=body)


def test_what_is_cancelled_before_the_engine_took_it_is_never_taken(narrow: Running) -> None:
    thread, job = narrow.server.state.llm.thread, Job([Prompt([9, 9, 9])], [SamplingParams()])
    with held(narrow.engine) as permits, ThreadPoolExecutor(1) as pool:
        first = pool.submit(narrow.http.post, "/v1/completions", json={**BODY, "max_tokens": 1})
        wait_for(lambda: narrow.engine.has_work)
        thread.submit(job)
        thread.cancel(job)
        permits.release(1)
        assert first.result().status_code == 200
    narrow.wait_idle()
    assert job.requests == []


def test_a_client_without_a_stream_that_leaves_frees_its_pages(narrow: Running) -> None:
    with held(narrow.engine) as permits:
        permits.release(2)
        leave(narrow, BODY)
        wait_for(lambda: bool(narrow.server.state.llm.thread._cancels))
        tokens = narrow.engine.stats.new_tokens
    narrow.wait_idle()
    assert narrow.engine.stats.new_tokens <= tokens + 1


def test_a_client_that_leaves_within_its_body_is_forgotten(narrow: Running) -> None:
    port = int(narrow.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{")
    assert narrow.http.get("/health").status_code == 200
    narrow.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["half-closed", "reset"])
def test_a_socket_that_is_half_closed_or_reset_ends_its_request(narrow: Running, stream: bool, how: str) -> None:
    before = narrow.metric("requests_ended_total", 'outcome="cancelled"')
    body = json.dumps({**BODY, "ignore_eos": True, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with held(narrow.engine) as permits, socket.create_connection(("127.0.0.1", int(narrow.url.rpartition(":")[2]))) as raw:
        raw.sendall(head + body)
        permits.release(3)
        wait_for(lambda: narrow.engine.stats.new_tokens > 0 and narrow.metric("kv_pages", 'state="used"') > 0)
        if how == "half-closed":
            raw.shutdown(socket.SHUT_WR)
        else:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.close()
        wait_for(lambda: bool(narrow.server.state.llm.thread._cancels) or not narrow.engine.has_work)
    narrow.wait_idle()
    assert narrow.metric("requests_ended_total", 'outcome="cancelled"') == before + 1 and len(narrow.server.state.calls) == 0


def test_many_clients_that_come_go_and_err_on_few_pages_leave_nothing_and_get_their_tokens() -> None:
    prompts = [prompt for seed in range(6) for prompt in random_prompts(seed, 3, 11, 20, 34)]
    with serving(lambda: make_engine(tokenizer=chat_tokenizer(), num_pages=40, max_requests=8)) as running:

        def client(number: int) -> None:
            rng = random.Random(number)
            prompt = rng.choice(prompts)
            settings: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 30, "temperature": 0}
            kind = rng.randrange(4)
            if kind == 0:
                body = {**settings, "return_token_ids": True}
                reply = running.http.post("/v1/completions", json=body).json()
                assert reply["choices"][0]["token_ids"] == oracle(prompt, 30)
            elif kind == 1:
                assert running.http.post("/v1/completions", json={**settings, "prompt": [*prompt, 999]}).status_code == 400
            else:
                stream = running.client.completions.create(stream=True, extra_body={"return_token_ids": True}, **settings)
                got = []
                for chunk in stream:
                    got += getattr(chunk.choices[0], "token_ids", [])
                    if kind == 2 and len(got) > rng.randrange(20):
                        break
                stream.close()
                assert got == oracle(prompt, 30)[: len(got)] and (kind == 2 or len(got) == 30)

        for prompt in prompts:
            oracle(prompt, 30)
        with ThreadPoolExecutor(24) as pool:
            list(pool.map(client, range(120)))
        running.wait_idle()
        assert running.metric("preemptions_total") > 0 and running.metric("failed_steps_total") == 0


@pytest.mark.parametrize("direct", [False, True])
def test_what_a_slow_client_has_missed_comes_in_pieces(direct: bool) -> None:
    """In one piece it would be cut off for not taking all of it in `write_seconds`, though it reads all the time."""
    sent: list[bytes] = []
    events = [f"data: {number:09}" for number in range(20000)]

    async def groups() -> AsyncIterator[list[str]]:
        yield events[:1]
        yield events[1:]

    async def send(message: Message) -> None:
        sent.extend(filter(None, [message.get("body")]))

    async def send_chunk(data: bytes) -> None:
        sent.append(data)

    async def stays() -> Message:
        return await asyncio.Future[Message]()

    connection = Mock(takes_chunks=direct, send_chunk=send_chunk)
    asyncio.run(EventStream(groups(), Mock())({"type": "http", "state": {"connection": connection}}, stays, send))
    assert b"".join(sent).decode() == "".join(f"{event}\n\n" for event in events)
    assert sent[0].decode() == events[0] + "\n\n" and len(sent) > 3 and all(0 < len(piece) <= PIECE for piece in sent)
