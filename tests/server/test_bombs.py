"""One body under the limit stops nobody: what it would make is counted before it is made."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.engine.sampling.structured.trials import MAX_DEFINITIONS
from paged_attn.server.http.body_limits import MAX_DEPTH, MAX_VALUES, BodyBudget, BodyShape
from paged_attn.server.http.errors import MAX_MESSAGE, ApiError
from tests.engine.models import make_engine, oracle
from tests.engine.sampling.test_guide_trials import objects, refs, rules
from tests.server.serving import Running, chat_tokenizer, serving, wait_for
from tests.timings import assert_in_time

MIB = 1 << 20
BODY: dict[str, Any] = {"prompt": [4, 5, 6], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"


def many(text: str, mib: float = 8) -> str:
    """A list of so many of them that it has this size."""
    return "[" + (text + ",") * int(mib * MIB / (len(text) + 1)) + text + "]"


def bomb(field: str, text: str, base: dict[str, Any] = BODY) -> bytes:
    """A body with one field of this text."""
    return (json.dumps({name: value for name, value in base.items() if name != field})[:-1] + f', "{field}": {text}}}').encode()


def deep(levels: int, opening: str = '{"a":', middle: str = "1", closing: str = "}") -> str:
    return opening * levels + middle + closing * levels


def called(arguments: str, times: int = 1) -> list[Any]:
    """Messages with calls of these arguments."""
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": arguments}}] * times}]


MANY_PARTS = '[{"role": "user", "content": ' + many('{"type":"input_text","text":"a"}', 8) + "}]"
BOMBS: dict[str, tuple[str, bytes]] = {
    "stops that are numbers": ("", bomb("stop", many("1"))),
    "stops": ("", bomb("stop", many('"a"'))),
    "a long stop": ("", bomb("stop", json.dumps("x" * MIB))),
    "half a million stops": ("", bomb("stop", many("1", 1))),
    "messages that are numbers": (CHATS, bomb("messages", many("1"), CHAT)),
    "half a million messages": (CHATS, bomb("messages", many("{}", 1), CHAT)),
    "messages of empty fields": (CHATS, bomb("messages", many('{"role":"u","content":[],"a":null}', 4), CHAT)),
    "parts": (CHATS, bomb("messages", '[{"role": "user", "content": ' + many('{"type":"text","text":"a"}', 8) + "}]", CHAT)),
    "stop_token_ids times n": ("", bomb("stop_token_ids", many("75000", 0.43), {**BODY, "n": 128})),
    "a salt": ("", bomb("cache_salt", json.dumps("s" * 10 * MIB))),
    "a model": ("", bomb("model", json.dumps("m" * 10 * MIB))),
    "biases": ("", bomb("logit_bias", "{" + ",".join(f'"{i}": "x"' for i in range(250_000)) + "}")),
    "unknown fields": ("", bomb("a0", "1, " + ", ".join(f'"a{i}": 1' for i in range(1, 250_000)))),
    "unknown fields inside": ("", bomb("stream_options", "{" + ", ".join(f'"a{i}": 1' for i in range(250_000)) + "}")),
    "a field that is not supported": ("", bomb("tools", many("1", 1))),
    "a prompt of 15 MiB": ("", bomb("prompt", json.dumps("x y " * (15 * MIB // 4)))),
    "a prompt of a million ids": ("", bomb("prompt", many("7", 1.9))),
    "250,000 prompts": ("", bomb("prompt", many('"ab"', 1))),
    "prompts times n": ("", bomb("prompt", many("[7]", 0.01), {**BODY, "n": 128})),
    "items": (RESPONSES, b'{"input": ' + many("{}", 1).encode() + b"}"),
    "parts of items": (RESPONSES, bomb("input", MANY_PARTS, {"max_output_tokens": 1})),
    "an instruction of 15 MiB": (RESPONSES, json.dumps({"input": "a", "instructions": "x y " * (15 * MIB // 4)}).encode()),
    "what comes back": (RESPONSES, json.dumps({"input": "a", "metadata": {"a": "x" * MIB}}).encode()),
    "tokens": ("/detokenize", b'{"tokens": ' + many("7", 1.9).encode() + b"}"),
    "15 MiB of text": ("/tokenize", json.dumps({"prompt": "x y " * (15 * MIB // 4)}).encode()),
    "a schema": ("", bomb("json_schema", json.dumps({"enum": ["x" * 100] * 5000}))),
    "schema of many values": ("", bomb("json_schema", '{"enum": ' + many("1", 1) + "}")),
    "a chain of references": ("", bomb("json_schema", json.dumps(refs(3000)))),
    "a chain of as many definitions as there may be": ("", bomb("json_schema", json.dumps(objects(MAX_DEFINITIONS - 1)))),
    "a chain of rules": ("", bomb("grammar", json.dumps(rules(5000)))),
    "an expression": ("", bomb("regex", json.dumps("a" * 10 * MIB))),
    "tools": (CHATS, bomb("tools", many('{"type":"function","function":{"name":"a"}}', 8), CHAT)),
    "a tool of many values": (CHATS, bomb("tools", '[{"function": {"name": "a", "parameters": {"enum": ' + many("1", 1) + "}}}]", CHAT)),
    "a tool of a long text": (CHATS, bomb("tools", json.dumps([{"function": {"name": "a", "description": "x" * 10 * MIB}}]), CHAT)),
    "a choice": (CHATS, bomb("tool_choice", '{"function": ' + many("1", 1) + "}", CHAT)),
    "arguments of many values": (CHATS, bomb("messages", json.dumps(called(many("[]", 8))), CHAT)),
    "arguments nested deep": (CHATS, bomb("messages", json.dumps(called(deep(MIB, "[", "", "]"))), CHAT)),
    "many calls": (CHATS, bomb("messages", json.dumps(called("{}", 100_000)), CHAT)),
    "parameters that lead from one to the next": (
        CHATS, bomb("tools", json.dumps([{"function": {"name": "a", "parameters": refs(3000)}}]), {**CHAT, "tool_choice": "required"})
    ),
    "template settings": (CHATS, bomb("chat_template_kwargs", '{"a": ' + many("1", 1) + "}", CHAT)),
    "nested 500 deep": (CHATS, bomb("chat_template_kwargs", deep(500), CHAT)),
    "nested a million deep": ("", bomb("metadata", deep(MIB, "[", "", "]"))),
    "two million values": ("", bomb("metadata", many("1", 4))),
    "five million lists": ("", bomb("metadata", many("[]", 15))),
    "another encoding": ("", json.dumps({"prompt": "a"}).encode("utf-16-le")),
}  # fmt: skip


@pytest.fixture(scope="module")
def bombed() -> Iterator[Running]:
    with serving() as running:
        # The first schema starts the process that tries them, in seconds where a disk is busy: that is no bomb's time.
        assert post(running, "", json.dumps({**BODY, "regex": "a"}).encode()).status_code == 200
        yield running


def post(running: Running, path: str, content: bytes) -> httpx.Response:
    return running.http.post(path or "/v1/completions", content=content, headers={"Content-Type": "application/json"})


@contextlib.contextmanager
def slowest_health(running: Running) -> Iterator[list[float]]:
    """Asks how the server is all the while; at the end the list holds how long the slowest answer took."""
    ended, slowest = threading.Event(), [0.0]

    def ask() -> None:
        with httpx.Client(base_url=running.url, timeout=60.0) as http:
            while not ended.is_set():
                started = time.perf_counter()
                assert http.get("/health").status_code == 200
                slowest[0] = max(slowest[0], time.perf_counter() - started)
                ended.wait(0.002)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield slowest
        finally:
            ended.set()
            asked.result()


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_and_holds_up_nobody(bombed: Running, name: str) -> None:
    path, content = BOMBS[name]
    post(bombed, "", json.dumps(BODY).encode())
    before = psutil.Process().memory_info().rss

    def sent() -> tuple[float, float]:
        with slowest_health(bombed) as slowest:
            started = time.perf_counter()
            reply = post(bombed, path, content)
            taken = time.perf_counter() - started
        assert reply.status_code == 400, reply.text[:300]
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and len(reply.content) < MAX_MESSAGE + 400
        return taken, slowest[0]

    assert_in_time(sent, 3.0, 1.5)
    grown = psutil.Process().memory_info().rss - before
    assert grown < 160 * MIB, f"{grown / MIB:.0f} MiB more"
    assert post(bombed, "", json.dumps(BODY).encode()).json()["choices"][0]["token_ids"] == oracle([4, 5, 6], 4)


def test_what_is_just_allowed_is_served() -> None:
    with serving(lambda: make_engine(tokenizer=chat_tokenizer(), num_pages=512)) as running:
        body = {
            **BODY, "stop": [chr(97 + i % 26) * (i + 1000) for i in range(24)], "stop_token_ids": list(range(1024)), "max_tokens": 1,
            "logit_bias": {str(i): 0.0 for i in range(96)}, "cache_salt": "ü" * 4096, "n": 128, "metadata": {"a": "x" * MIB},
        }  # fmt: skip
        reply = post(running, "", json.dumps(body).encode())
        assert reply.status_code == 200 and len(reply.json()["choices"]) == 128, reply.text[:300]
        chat = {**CHAT, "chat_template_kwargs": {"a": json.loads(deep(60)), "b": ["x" * 60_000]}}
        assert post(running, CHATS, json.dumps(chat).encode()).status_code == 200


def test_a_salt_does_not_stay_in_the_prefix_cache() -> None:
    with serving() as running:
        body = {**BODY, "prompt": [7] * 40, "cache_salt": "s" * 4000}
        for cached in (0, 36):
            reply = post(running, "", json.dumps(body).encode())
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert running.engine.kv.tree is not None
        assert all(len(repr(namespace)) < 100 for namespace in running.engine.kv.tree._roots)


def test_many_answers_share_what_they_have_in_common(bombed: Running) -> None:
    body = {**BODY, "stop_token_ids": [90, *range(1000, 2000)], "n": 100, "seed": 5, "temperature": 1, "max_tokens": 1}
    kept: list[Any] = []
    add = bombed.engine.add_request
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bombed.engine, "add_request", lambda *args, **settings: kept.append(add(*args, **settings)) or kept[-1])
        assert post(bombed, "", json.dumps(body).encode()).status_code == 200
    assert len(kept) == 100 and len({request.params.seed for request in kept}) == 100
    for shared in (lambda r: r.stop_token_ids, lambda r: r.params.stop_token_ids, lambda r: r.params.logit_bias):
        assert len({id(shared(request)) for request in kept}) == 1


def shape_of(content: bytes, step: int = 65536) -> BodyShape:
    shape = BodyShape()
    for start in range(0, len(content), step):
        shape.feed(content[start : start + step])
    return shape


def counted(value: Any) -> int:
    """What opens, and what follows a comma."""
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(len(value) - 1, 0) + sum(map(counted, value.values() if isinstance(value, dict) else value))


TRICKY = st.sampled_from(['"', "\\", '\\"', "\\\\", '\\\\"[[,{', "é,", 1, None])
VALUES = st.recursive(TRICKY, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(['"', "a,[{", "\\"]), inner))


@settings(max_examples=300, deadline=None)
@given(VALUES, st.booleans(), st.integers(1, 9))
def test_values_are_counted_however_the_bytes_come(value: Any, ascii_only: bool, step: int) -> None:
    shape = shape_of(json.dumps(value, ensure_ascii=ascii_only).encode(), step)
    assert (shape.values, shape.depth) == (1 + counted(value), 0)


def test_the_limits_of_shapes_are_where_they_are_said_to_be() -> None:
    shape_of(b"[" + b"1," * (MAX_VALUES - 2) + b"1]")
    with pytest.raises(ApiError, match="more than 1,048,576 values"):
        shape_of(b"[" + b"1," * MAX_VALUES + b"1]")
    shape_of(deep(MAX_DEPTH).encode())
    with pytest.raises(ApiError, match="more than 100 deep"):
        shape_of(deep(MAX_DEPTH + 1).encode())
    shape_of(json.dumps("[,{" * MIB).encode())


def test_bodies_of_all_requests_share_a_budget() -> None:
    budget = BodyBudget(8 * MIB)
    budget.take("a", 0, 4 * MIB)
    with pytest.raises(ApiError, match="too many large bodies at the same time: 4 of 8 MiB are taken"):
        budget.take("a", 4 * MIB, 1)
    budget.take("b", 0, 2 * MIB)
    budget.take("a", 0, 1000)  # a small one always finds room
    budget.give_back("a", 4 * MIB + 1000)
    budget.take("c", 0, 3 * MIB)
    for tenant, size in (("b", 2), ("c", 3)):
        budget.give_back(tenant, size * MIB)
    assert budget.total == 0 and not budget.held


def test_large_bodies_at_the_same_time_are_refused_and_give_their_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = BodyBudget(6 * MIB)
    monkeypatch.setattr("paged_attn.server.http.guard.BodyBudget", lambda most: budget)
    with serving(max_body_mib=3.0, max_bodies_mib=6.0) as running:
        content = bomb("metadata", json.dumps("x" * (5 * MIB // 2)))
        assert post(running, "", content).status_code == 200
        wait_for(lambda: budget.total == 0)
        with _half_a_body(running, 3 * MIB // 2):
            wait_for(lambda: budget.total >= 3 * MIB // 2)
            reply = post(running, "", content)
            assert reply.status_code == 429 and reply.json()["error"]["code"] == "bodies_too_large" and reply.headers["Retry-After"] == "1"
            assert post(running, "", json.dumps(BODY).encode()).status_code == 200
        wait_for(lambda: budget.total == 0)
        assert post(running, "", content).status_code == 200


@contextlib.contextmanager
def _half_a_body(running: Running, size: int) -> Iterator[None]:
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {2 * size}\r\n\r\n"
        raw.sendall(head.encode() + b'{"metadata": "' + b"x" * size)
        yield
