"""POST /v1/responses with OpenAI's own client: whole, streamed, parsed, with tools and reasoning; and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.engine.models import make_engine, oracle, tokenizer
from tests.server.serving import MODEL, Running, chat_tokenizer, held, serving, wait_for
from tests.server.test_tools import NOW, ROME, SAYS_ALL

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": CITY, "strict": True},
    {"type": "function", "name": "now", "description": "the time"},
]


@pytest.fixture(scope="module")
def tooled() -> Iterator[Running]:
    own = chat_tokenizer()
    own.chat_template = SAYS_ALL
    with serving(lambda: make_engine(tokenizer=own)) as running:
        yield running
        running.wait_idle()


def ask(running: Running, said: str | None = None, stream: bool = False, given: Any = "Rome?", **settings: Any) -> Any:
    """The response, whole or as the last event of a stream brings it. The model's answer is forced to be `said`."""
    extra = {} if said is None else {"regex": re.escape(said)}
    settings = {"model": MODEL, "input": given, "temperature": 0, "max_output_tokens": 200, "extra_body": extra, **settings}
    if not stream:
        return running.client.responses.create(**settings)
    events = list(running.client.responses.create(**settings, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events[-1].response


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_is_the_models(running: Running, stream: bool) -> None:
    prompt = tokenizer()("system> Be kind.; user> Hi; assistant>").input_ids
    answer = ask(running, given="Hi", instructions="Be kind.", max_output_tokens=9, stream=stream, metadata={"a": "b"})
    want = tokenizer().decode(oracle(prompt, 9), skip_special_tokens=True)
    assert answer.output_text == want and answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.input_tokens == len(prompt) and answer.usage.output_tokens == 9 and answer.usage.total_tokens == len(prompt) + 9
    assert answer.metadata == {"a": "b"} and answer.store is False and answer.id.startswith("resp_") and answer.model == MODEL


def test_the_events_of_a_text_are_openais(tooled: Running) -> None:
    events = list(tooled.client.responses.create(model=MODEL, input="x", stream=True, extra_body={"regex": "Yes!"}))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1 and kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    added, text = events[2], "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "Yes!" == events[-4].text == events[-1].response.output_text  # type: ignore[union-attr]
    assert {event.item_id for event in events[3:-2]} == {added.item.id} == {events[-1].response.output[0].id}  # type: ignore[union-attr]
    assert {event.response.id for event in events if hasattr(event, "response")} == {events[0].response.id}  # type: ignore[union-attr]
    with tooled.client.responses.stream(model=MODEL, input="x", extra_body={"regex": "Yes!"}) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == "Yes!"
        assert stream.get_final_response().output_text == "Yes!"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_items_and_so_are_their_results(tooled: Running, stream: bool) -> None:
    answer = ask(tooled, ROME + NOW, stream, tools=TOOLS)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Rome"}), ("now", {})]
    assert len(calls) == len(answer.output) and answer.status == "completed" and answer.tools[0].name == "weather"
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls]
    given = [{"role": "user", "content": "Rome?"}, *answer.output, *results]
    messages = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "tool_calls": [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments or "{}"}} for call in calls
        ]},
        *({"role": "tool", "tool_call_id": call.call_id, "content": "sun"} for call in calls),
    ]  # fmt: skip
    tools: Any = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
    again = tooled.client.responses.create(model=MODEL, input=given, tools=TOOLS, temperature=0, max_output_tokens=8)
    chat: Any = messages
    same = tooled.client.chat.completions.create(model=MODEL, messages=chat, tools=tools, temperature=0, max_tokens=8)
    assert same.usage is not None and again.usage is not None
    assert (again.output_text, again.usage.input_tokens) == (same.choices[0].message.content, same.usage.prompt_tokens)


def body_of_codex(**settings: Any) -> dict[str, Any]:
    """All the fields that Codex sends, beside the answer that shall come."""
    says = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}
    asks = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rome?"}]}
    body = {
        "model": MODEL, "instructions": "You are an agent.", "input": [says, asks], "tool_choice": "auto", "parallel_tool_calls": False,
        "tools": [{"type": "web_search", "external_web_access": False}, {"type": "image_generation", "output_format": "png"}, *TOOLS],
        "reasoning": {"effort": "medium", "summary": "detailed"}, "store": False, "stream": True, "prompt_cache_key": "a",
        "include": ["reasoning.encrypted_content"], "client_metadata": {"installation": "b"},
    }  # fmt: skip
    return body | settings


def last_response(running: Running, body: dict[str, Any]) -> dict[str, Any]:
    lines = running.http.post("/v1/responses", json=body).raise_for_status().text.splitlines()
    response: dict[str, Any] = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])["response"]
    return response


def test_what_codex_sends_is_taken_and_the_answer_says_which_tools_the_model_was_shown(tooled: Running) -> None:
    answer = last_response(tooled, body_of_codex(regex=re.escape(NOW)))
    assert [item["name"] for item in answer["output"]] == ["now"] and [tool["name"] for tool in answer["tools"]] == ["weather", "now"]
    plain = last_response(tooled, body_of_codex(tools=TOOLS, regex=re.escape(NOW)))
    assert plain["usage"]["input_tokens"] == answer["usage"]["input_tokens"]


def test_functions_of_a_namespace_are_called_by_a_longer_name_and_come_back_by_their_own(tooled: Running) -> None:
    tools = [{"type": "namespace", "name": "mcp", "description": "a server", "tools": TOOLS}, TOOLS[1]]
    said = ROME.replace("weather", "mcp__weather") + NOW
    answer = last_response(tooled, body_of_codex(tools=tools, regex=re.escape(said), parallel_tool_calls=True))
    calls = [(item["name"], item.get("namespace")) for item in answer["output"]]
    assert calls == [("weather", "mcp"), ("now", None)] and answer["tools"][0] == tools[0]
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "sun"} for item in answer["output"]]
    again = last_response(tooled, body_of_codex(input=[*answer["output"], *results], instructions=None, tools=tools, max_output_tokens=1))
    calls_again = "a><tool_call>mcp__weatherRome<tool_call>now;" + "".join(f"tool{result['call_id']}>sun;" for result in results)
    prompt = "mcp__weather mcp__now now " + calls_again + "a>"
    assert again["usage"]["input_tokens"] == len(tokenizer()(prompt.replace("a><", "assistant><", 1)).input_ids)


def test_an_effort_is_a_variable_of_templates_that_read_it_and_changes_nothing_elsewhere(tooled: Running) -> None:
    plain = ask(tooled, max_output_tokens=4)
    asked = ask(tooled, max_output_tokens=4, reasoning={"effort": "max", "summary": "concise"})
    assert (asked.output_text, asked.usage.input_tokens) == (plain.output_text, plain.usage.input_tokens)
    own = chat_tokenizer()
    own.chat_template = "{{ reasoning_effort }}"
    with serving(lambda: make_engine(tokenizer=own)) as running:
        assert ask(running, max_output_tokens=1, reasoning={"effort": "medium"}).usage.input_tokens == len("medium")
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "output_config": {"effort": "max"}}
        assert running.http.post("/v1/messages", json=body).json()["usage"]["input_tokens"] == len("max")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_can_be_asked_for(tooled: Running, choice: Any, stream: bool) -> None:
    answer = ask(tooled, None, stream, tools=TOOLS[:1], tool_choice=choice, parallel_tool_calls=False)
    (call,) = answer.output
    assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_an_item_of_its_own_and_may_be_sent_back(tooled: Running, stream: bool) -> None:
    grammar = {"grammar": 'start: "<think>ab</think>hi"'}
    answer = ask(tooled, None, stream, extra_body=grammar)
    if [item.type for item in answer.output] == ["message"]:
        pytest.fail(f"no reasoning in {answer.output_text!r}")
    thought, said = answer.output
    assert (thought.type, thought.content[0].text, said.content[0].text) == ("reasoning", "ab", "hi")
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    sent = tooled.client.responses.create(model=MODEL, input=[{"role": "user", "content": "a"}, *answer.output], max_output_tokens=1)
    assert sent.usage is not None and sent.usage.input_tokens == len(tokenizer()("user>a;assistant>abhi;a>").input_ids)


def test_parse_reads_a_model_of_pydantic(running: Running) -> None:
    class City(BaseModel):
        name: Literal["Rome", "Oslo"]
        big: bool

    answer = running.client.responses.parse(model=MODEL, input="A city?", text_format=City, max_output_tokens=200, temperature=0)
    assert answer.status == "completed" and isinstance(answer.output_parsed, City)
    schema = {"type": "object", "properties": {"big": {"type": "boolean"}}, "required": ["big"], "additionalProperties": False}
    format: Any = {"format": {"type": "json_schema", "name": "City", "schema": schema, "strict": True}}
    answer = ask(running, given="A city?", text=format)
    assert answer.status == "completed" and isinstance(json.loads(answer.output_text)["big"], bool)


def test_system_messages_before_each_other_are_one_and_developers_are_system(running: Running) -> None:
    parts = [{"type": "input_text", "text": "H"}, {"type": "input_text", "text": "i"}]
    given = [{"role": "developer", "content": "B"}, {"type": "message", "role": "user", "content": parts}]
    answer = ask(running, given=given, instructions="A", max_output_tokens=2)
    assert answer.usage.input_tokens == len(tokenizer()("system> A\n\nB; user> Hi; assistant>").input_ids)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "a text, or a list of items"),
        ({"input": 5}, "input", "got 5"),
        ({}, "input", "Field required"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content", "input_image"),
        ({"input": [{"role": "user", "content": "a", "color": 1}]}, "input.0", "color"),
        ({"input": [{"role": "user", "content": "a"}] * 4097}, "input", "4,097 items"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "stores no answers"),
        ({"input": "a", "background": True}, "background", "stores no answers"),
        ({"input": "a", "truncation": "auto"}, "truncation", "nothing is left out"),
        ({"input": "a", "reasoning": {"effort": "more"}}, "reasoning.effort", "'low', 'medium', 'high', 'xhigh' or 'max'"),
        ({"input": "a", "reasoning": {"summary": "none"}}, "reasoning.summary", "'auto', 'concise' or 'detailed'"),
        ({"input": "a", "max_tokens": 3}, "max_tokens", "give max_output_tokens"),
        ({"input": "a", "n": 2}, "n", "leave it out"),
        ({"input": "a", "max_output_tokens": -1}, "max_output_tokens", "max_output_tokens"),
        ({"input": "a", "tools": [{"type": "file_search"}]}, "tools.0.type", "file_search"),
        ({"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "without tools"),
        ({"input": "a", "tools": [{"type": "namespace", "tools": []}]}, "tools.0.name", "allowed: a text"),
        ({"input": "a", "tools": [{"type": "namespace", "name": "x"}]}, "tools.0.tools", "allowed: a list of functions"),
        ({"input": "a", "tools": [{"type": "namespace", "name": "x", "tools": [5]}]}, "tools.0.tools.0.type", "got 5"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "namespace": 1}]}, "input.0.namespace", "allowed: a text"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema belongs"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include", "reasoning comes"),
        ({"input": "a", "messages": []}, "messages", "unknown field"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_said(running: Running, body: dict[str, Any], param: str, words: str) -> None:
    reply = running.http.post("/v1/responses", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param) and words in error["message"], error


@pytest.mark.parametrize("name", ["instructions", "metadata", "tools", "text"])
@pytest.mark.parametrize("bad", ['"\\ud83d"', "NaN"])
def test_what_comes_back_can_be_written(running: Running, name: str, bad: str) -> None:
    tool = f'{{"type": "function", "name": "f", "parameters": {{"a": {bad}}}}}'
    fields = {"instructions": bad, "metadata": f'{{"a": {bad}}}', "tools": f"[{tool}]",
              "text": f'{{"format": {{"type": "text", "description": {bad}}}}}'}  # fmt: skip
    content = f'{{"input": "a", "max_output_tokens": 1, "tool_choice": "none", "{name}": {fields[name]}}}'
    reply = running.http.post("/v1/responses", content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["param"].startswith(name), reply.text


def test_a_client_that_leaves_a_stream_frees_its_pages(running: Running) -> None:
    with running.client.responses.create(model=MODEL, input="Hi", stream=True, extra_body={"ignore_eos": True}) as events:
        assert next(iter(events)).type == "response.created"
    running.wait_idle()


def test_an_end_by_id_is_the_last_event_of_a_stream(running: Running) -> None:
    with held(running.engine) as permits:
        permits.release(2)
        headers = {"x-request-id": "mine"}
        with running.client.responses.create(model=MODEL, input="Hi", stream=True, extra_headers=headers) as events:
            first = next(iter(events))
            assert first.type == "response.created"
            assert running.http.post("/v1/requests/mine/cancel").json()["cancelled"] == 1
            last = list(events)[-1]
        permits.release(100)
    assert last.type == "response.failed" and last.response.error is not None and last.response.error.code == "cancelled"
    running.wait_idle()


def test_it_needs_a_key_and_counts_as_a_request() -> None:
    with serving(api_keys=("secret",), requests_per_minute_per_key=2) as running:
        for path in ("/v1/responses", "/tokenize", "/detokenize"):
            assert running.http.post(path, json={}, headers={"Authorization": ""}).status_code == 401
        body = {"input": "a", "max_output_tokens": 1}
        replies = [running.http.post("/v1/responses", json=body).status_code for _ in range(3)]
        assert replies == [200, 200, 429]
        with pytest.raises(openai.RateLimitError):
            running.client.responses.create(model=MODEL, input="a")
        wait_for(lambda: len(running.server.state.calls) == 0)
