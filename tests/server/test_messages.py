"""POST /v1/messages, as Anthropic's API has it: whole, streamed, with tools and thinking; and what it refuses. What a tiny model shall say
is forced by an expression. Anthropic's own client was tried on the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.engine.models import make_engine, oracle, tokenizer
from tests.server.serving import MODEL, Running, chat_tokenizer, held, serving, wait_for
from tests.server.test_tools import CITY, NOW, ROME, SAYS_ALL

HELLO: list[Any] = [{"role": "user", "content": "Rome?"}]
TOOLS: list[Any] = [
    {"name": "weather", "description": "sun or rain", "input_schema": CITY, "cache_control": {"type": "ephemeral"}},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}, "type": "custom"},
]
TEXT, IMAGE = {"type": "text", "text": "a"}, {"type": "image", "source": {}}


@pytest.fixture(scope="module")
def tooled() -> Iterator[Running]:
    own = chat_tokenizer()
    own.chat_template = SAYS_ALL
    with serving(lambda: make_engine(tokenizer=own)) as running:
        yield running
        running.wait_idle()


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name."""
    found = []
    for lines in text.strip().split("\n\n"):
        name, data = (line.partition(": ")[2] for line in lines.split("\n"))
        found.append(json.loads(data))
        assert found[-1]["type"] == name
    return found


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together."""
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message = dict(events[0]["message"])
    blocks, inputs = message["content"], dict[int, str]()
    for event in events[1:-2]:
        index, kind = event["index"], event["type"]
        if kind == "content_block_start":
            assert index == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                inputs[index] = inputs.get(index, "") + delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                blocks[index][field] += delta[field]
        else:
            assert kind == "content_block_stop" and index == len(blocks) - 1
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def ask(running: Running, said: str | None = None, stream: bool = False, **settings: Any) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": 200, "messages": HELLO, "temperature": 0, "stream": stream, **settings}
    if said is not None:
        body["regex"] = re.escape(said)
    reply = running.http.post("/v1/messages", json=body).raise_for_status()
    return accumulated(events_of(reply.text)) if stream else dict(reply.json())


BOTH = pytest.mark.parametrize("stream", [False, True])


@BOTH
def test_the_answer_is_the_models(running: Running, stream: bool) -> None:
    prompt = tokenizer()("system> Be kind.\n\nAlways.; user> Rome?; assistant>").input_ids
    system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Always."}]
    answer = ask(running, system=system, max_tokens=9, stream=stream, metadata={"user_id": "me"}, cache_salt=str(stream))
    text = tokenizer().decode(oracle(prompt, 9), skip_special_tokens=True)
    assert answer["content"] == [{"type": "text", "text": text}] and answer["id"].startswith("msg_")
    assert {name: answer[name] for name in ("type", "role", "model", "stop_reason", "stop_sequence")} == {
        "type": "message", "role": "assistant", "model": MODEL, "stop_reason": "max_tokens", "stop_sequence": None,
    }  # fmt: skip
    assert answer["usage"] == {
        "input_tokens": len(prompt), "output_tokens": 9, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0,
    }  # fmt: skip
    again = ask(running, system=system, max_tokens=9, stream=stream, cache_salt=str(stream))["usage"]
    assert again["cache_read_input_tokens"] > 0 and again["cache_read_input_tokens"] + again["input_tokens"] == len(prompt)


@BOTH
def test_why_an_answer_ends(running: Running, stream: bool) -> None:
    answer = ask(running, "aabb", stream, stop_sequences=["x", "b"])
    assert (answer["content"][0]["text"], answer["stop_reason"], answer["stop_sequence"]) == ("aa", "stop_sequence", "b")
    answer = ask(running, "aabb", stream, stop_sequences=["c"], stop="d")
    assert (answer["content"][0]["text"], answer["stop_reason"], answer["stop_sequence"]) == ("aabb", "end_turn", None)
    assert ask(running, stream=stream, max_tokens=0)["content"] == []


@BOTH
def test_thoughts_text_and_calls_are_blocks_and_come_back(tooled: Running, stream: bool) -> None:
    answer = ask(tooled, f"<think>hm</think>Well {ROME}{NOW}", stream, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
    thought, text, *calls = answer["content"]
    assert thought == {"type": "thinking", "thinking": "hm", "signature": ""} and (text["type"], text["text"].strip()) == ("text", "Well")
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "weather", {"city": "Rome"}), ("tool_use", "now", {}),
    ]  # fmt: skip
    assert answer["stop_reason"] == "tool_use" and len({call["id"] for call in calls}) == 2
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sun"}]} for call in calls]
    turns = [*HELLO, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [*results, TEXT]}]
    function = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": json.dumps(call["input"])}} for call in calls
    ]
    same: list[Any] = [
        HELLO[0], {"role": "assistant", "reasoning_content": "hm", "content": text["text"], "tool_calls": function},
        *({"role": "tool", "tool_call_id": call["id"], "content": "sun"} for call in calls), {"role": "user", "content": "a"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}} for tool in TOOLS]
    body = {"messages": same, "tools": tools, "max_tokens": 6, "temperature": 0}
    chat = tooled.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    again = ask(tooled, stream=stream, messages=turns, tools=TOOLS, max_tokens=6)
    assert again["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    counted = tooled.http.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": turns, "tools": TOOLS}).json()
    assert counted == {"input_tokens": chat["usage"]["prompt_tokens"]}


@BOTH
def test_a_call_may_be_asked_for(tooled: Running, stream: bool) -> None:
    settings: dict[str, Any] = {"chat_template_kwargs": {}, "temperature": 1, "seed": 3, "max_tokens": 400}
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    for seed in range(20):  # it may think for as long as it likes first
        answer = ask(tooled, stream=stream, tools=TOOLS, tool_choice=choice, logit_bias={"29": 100}, **settings | {"seed": seed})
        if answer["stop_reason"] == "tool_use":
            break
    assert [block["name"] for block in answer["content"] if block["type"] == "tool_use"] == ["weather"]
    assert ask(tooled, "Oslo", stream, tools=TOOLS, tool_choice={"type": "none"})["content"] == [{"type": "text", "text": "Oslo"}]


def test_a_last_message_of_the_assistant_is_gone_on_with(running: Running) -> None:
    turns = [*HELLO, {"role": "user", "content": "Or Oslo?"}, {"role": "assistant", "content": [TEXT, {"type": "text", "text": "b"}]}]
    prompt = tokenizer()("user> Rome?\n\nOr Oslo?; assistant> ab").input_ids
    answer = ask(running, messages=turns, max_tokens=7)
    assert answer["content"][0]["text"] == tokenizer().decode(oracle(prompt, 7), skip_special_tokens=True)


def test_an_answer_may_follow_a_schema(running: Running) -> None:
    format = {"type": "json_schema", "schema": {"const": 7}}
    assert ask(running, output_config={"format": format})["content"][0]["text"] == "7"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role: got 'tool'; allowed: user, assistant, system"),
        ({"messages": [{"role": "user", "content": "a", "name": "x"}]}, "messages.0: field 'name' is not supported"),
        ({"messages": [{"role": "user", "content": [TEXT, IMAGE]}]}, "messages.0.content.1: got a block of type 'image'; allowed here"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text: got None; allowed: a text"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content: got 7; allowed: a text, or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]}, "type 'image'"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "now", "input": {}}]}]},
            "messages.1: the last message calls a tool; send its result",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": "c"}]}]}, "a JSON object"),
        ({"system": [IMAGE]}, "system.0: got a block of type 'image'; allowed here: text"),
        ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": -1}, "max_tokens: got -1; allowed: an int >= 0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type: got 'web_search_20250305'; allowed: 'custom'"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, 'tool_choice: type "tool" without a name'),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: no tool is called 'x'"),
        ({"container": "a"}, "container='a' is not supported; this server runs no code"),
        ({"mcp_servers": [{}]}, "this server calls no others"),
        ({"n": 2}, "n=2 is not supported; this route gives one answer"),
        ({"stream_options": {"include_usage": True}, "stream": True}, "is not supported; streams of this route have the usage"),
        ({"stops": "a"}, "unknown field 'stops'; did you mean 'stop'?"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: got 0"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "nothing is left out of a conversation"),
    ],
    ids=[f"{i}" for i in range(22)],
)  # fmt: skip
def test_errors_have_anthropics_form(tooled: Running, bad: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        reply = tooled.http.post("/v1/messages", json={"max_tokens": 4, "messages": HELLO, "stream": stream, **bad})
        error = reply.json()
        assert reply.status_code == 400 and set(error) == {"type", "error"} and error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error" and words in error["error"]["message"]


@BOTH
def test_what_claude_code_sends_with_every_request_is_taken(tooled: Running, stream: bool) -> None:
    plain = ask(tooled, stream=stream, max_tokens=4, tools=TOOLS)
    keeps_all = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    own = {
        "context_management": keeps_all,
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "a"},
    }
    answer = ask(tooled, stream=stream, max_tokens=4, tools=TOOLS, **own)
    assert answer["content"] == plain["content"]


def test_models_have_anthropics_fields_beside_openais(running: Running) -> None:
    listed = running.http.get("/v1/models").json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, MODEL, MODEL)
    (model,) = listed["data"]
    assert model == running.http.get(f"/v1/models/{MODEL}").json()
    assert (model["type"], model["object"], model["display_name"]) == ("model", "model", MODEL)
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]


def test_other_errors(running: Running) -> None:
    body: dict[str, Any] = {"model": "other", "max_tokens": 4, "messages": HELLO}
    reply = running.http.post("/v1/messages", json=body)
    assert reply.status_code == 404 and reply.json()["error"]["type"] == "not_found_error"
    reply = running.http.post("/v1/messages/count_tokens", json={"model": "other", "messages": HELLO})
    assert reply.status_code == 404 and reply.json()["error"]["type"] == "not_found_error"
    assert running.http.get("/v1/messages").json()["type"] == "error"
    assert "type" not in running.http.get("/v1/message").json(), "OpenAI's form elsewhere"
    with held(running.engine):
        body = {"max_tokens": 40, "messages": HELLO, "stream": True}
        with running.http.stream("POST", "/v1/messages", json=body, headers={"x-request-id": "mine"}) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: message_start"
            wait_for(lambda: running.num_prompts == 1)
            assert running.http.post("/v1/requests/mine/cancel").json()["cancelled"] == 1
            events = events_of("event: message_start\n" + "\n".join(lines))
    assert events[-1]["type"] == "error" and "cancelled by its id" in events[-1]["error"]["message"]


def test_anthropics_clients_send_the_key_in_a_header_of_its_own() -> None:
    with serving(api_keys=("secret",)) as running:
        del running.http.headers["Authorization"]
        body = {"max_tokens": 1, "messages": HELLO}
        for headers, status in (({"x-api-key": "secret"}, 200), ({"x-api-key": "other"}, 401), ({}, 401)):
            reply = running.http.post("/v1/messages", json=body, headers=headers)
            assert reply.status_code == status
        assert reply.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/messages/count_tokens"])
def test_the_schema_has_anthropics_errors(running: Running, route: str) -> None:
    answers = running.http.get("/openapi.json").json()["paths"][route]["post"]["responses"]
    for status in ("400", "503", "default"):
        assert answers[status]["content"]["application/json"]["schema"]["$ref"].endswith("/AnthropicErrorReply")
