"""What real clients act on, beyond the answers themselves: codes and words of errors, headers, routes that only they ask for. Each was
found by running them (docs/http_api.md, "Clients that were run")."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.engine.models import make_engine
from tests.server.serving import MODEL, Running, chat_tokenizer, serving
from tests.server.test_tools import CITY, HELLO, SAYS_ALL, TOOLS, ask, calls_of

CLAUDE_CODE = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)  # as it reads both numbers
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def tooled() -> Iterator[Running]:
    own = chat_tokenizer()
    own.chat_template = SAYS_ALL
    with serving(lambda: make_engine(tokenizer=own)) as running:
        yield running
        running.wait_idle()


@pytest.mark.parametrize("length", [60, 200, 100_000], ids=["a-little", "twice", "far"])
def test_a_conversation_that_is_too_long_is_told_so_that_clients_shorten_it(tooled: Running, length: int) -> None:
    text = "long " * length
    asked: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/responses", "input", {"input": text}),
        ("/v1/completions", "prompt", {"prompt": text}),
    )
    for path, param, body in asked:
        for stream in (False, True):
            reply = tooled.http.post(path, json={"model": MODEL, "stream": stream, **body})
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param), error
            assert "the prompt is too long: " in error["message"] and "shorten it" in error["message"]
    reply = tooled.http.post("/v1/messages", json={"model": MODEL, "max_tokens": 3, **asked[0][2]})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error") and "prompt is too long" in error["message"]
    if length < 100_000:
        found = CLAUDE_CODE.search(error["message"])
        assert found is not None and int(found[1]) > int(found[2]) == 256


def test_token_ids_that_are_too_many_have_the_code_too(tooled: Running) -> None:
    for count in (257, 1000):
        with pytest.raises(openai.BadRequestError) as caught:
            tooled.client.completions.create(model=MODEL, prompt=[5] * count)
        assert caught.value.code == "context_length_exceeded" and f"too long: {count} tokens > 256" in str(caught.value)


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_anthropics_tool_runner_is_told_to_go_on_without_a_thread(tooled: Running, thread: Any) -> None:
    body = {"model": MODEL, "max_tokens": 3, "messages": HELLO, "thread": thread}
    reply = tooled.http.post("/v1/messages", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["details"] == {"error_code": "thread_unsupported_request"}
    assert "send the whole of it" in error["message"]
    assert tooled.http.post("/v1/messages", json={**body, "thread": None}).status_code == 200
    refused = tooled.http.post("/v1/messages", json={**body, "thread": None, "compaction": {"instructions": "short"}}).json()
    assert "summarizes no conversations" in refused["error"]["message"] and "details" not in refused["error"]


def test_anthropics_client_finds_the_requests_id_and_errors_in_its_form_on_every_path(tooled: Running) -> None:
    reply = tooled.http.post("/v1/messages", json={"model": MODEL, "max_tokens": 1, "messages": HELLO}, headers={"x-request-id": "mine"})
    assert reply.headers["request-id"] == reply.headers["x-request-id"] == "mine"
    for path in ("/v1/models/other", "/v1/files"):
        reply = tooled.http.get(path, headers=ANTHROPIC)
        error = reply.json()
        assert (reply.status_code, error["type"], error["error"]["type"]) == (404, "error", "not_found_error")
        assert set(tooled.http.get(path).json()["error"]) == {"message", "type", "param", "code"}
    model = tooled.http.get(f"/v1/models/{MODEL}", headers=ANTHROPIC).json()
    assert model["max_input_tokens"] == model["max_tokens"] == model["max_model_len"] == 256


def test_what_only_hosted_apis_have_is_refused_with_what_to_do_instead(tooled: Running) -> None:
    client = tooled.client
    for call, words in (
        (lambda: client.batches.list(), "`paged-attn run-batch MODEL"),
        (
            lambda: client.batches.create(input_file_id="f", endpoint="/v1/responses", completion_window="24h"),
            "`paged-attn run-batch MODEL",
        ),
        (lambda: client.files.create(file=b"{}", purpose="batch"), "stores no files: put their text"),
        (lambda: client.responses.retrieve("resp_1"), "stores no answers: send the whole conversation"),
        (lambda: client.responses.delete("resp_1"), "stores no answers"),
        (lambda: client.responses.cancel("resp_1"), "stores no answers"),
        (lambda: client.conversations.create(), "stores no answers"),
        (lambda: client.images.generate(prompt="a"), "listed at /docs"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert words in str(caught.value), caught.value
    reply = tooled.http.post("/v1/messages/batches", json={"requests": []})
    assert reply.status_code == 404 and "run-batch" in reply.json()["error"]["message"]


def test_the_tokens_of_an_input_of_responses_are_counted_as_they_are_charged(tooled: Running) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": CITY}
    given: Any = {"model": MODEL, "input": "Rome?", "instructions": "Be short.", "tools": [tool]}
    counted = tooled.client.responses.input_tokens.count(**given)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == tooled.client.responses.create(**given, max_output_tokens=1).usage.input_tokens  # type: ignore[union-attr]
    reply = tooled.http.post("/v1/responses/input_tokens", json={"input": "long " * 100_000})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")


def test_lm_eval_learns_the_tokenizers_special_tokens_and_template(tooled: Running) -> None:
    info = tooled.http.get("/tokenizer_info").json()
    own = chat_tokenizer()
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == (own.eos_token, own.bos_token, own.pad_token)
    assert info["chat_template"] == SAYS_ALL and info["tokenizer_class"] == type(own).__name__
    with serving(make_engine) as running:
        assert running.http.get("/tokenizer_info").json()["error"]["code"] == "no_tokenizer"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call_that_is_forced_comes_whatever_form_texts_would_have(tooled: Running, stream: bool) -> None:
    """As instructor asks for it over /v1/responses."""
    schema = {"type": "object", "properties": {"big": {"type": "boolean"}}, "required": ["big"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "size", "schema": schema}}
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    message, reason = ask(tooled, None, stream, tools=TOOLS, tool_choice=choice, response_format=form)
    ((name, arguments),) = calls_of(message)
    assert (name, reason) == ("weather", "tool_calls") and arguments["city"] in ("Rome", "Oslo")
    given: Any = {"type": "function", "name": "weather", "parameters": CITY}
    text: Any = {"format": {"type": "json_schema", "name": "size", "schema": schema}}
    answer = tooled.client.responses.create(
        model=MODEL, input="Rome?", tools=[given], tool_choice={"type": "function", "name": "weather"}, text=text, temperature=0
    )
    assert [item.type for item in answer.output] == ["function_call"]


def test_allowed_tools_are_the_only_ones_that_are_called_and_shown(tooled: Running) -> None:
    named: Any = [{"type": "function", "function": {"name": "now"}}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    message, _ = ask(tooled, None, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert [name for name, _ in calls_of(message)] == ["now"]
    auto: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    given: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 1}
    of_now = tooled.client.chat.completions.create(**given, tools=[TOOLS[1]]).usage
    assert tooled.client.chat.completions.create(**given, tools=TOOLS, tool_choice=auto).usage.prompt_tokens == of_now.prompt_tokens  # type: ignore[union-attr]
    tools: Any = [{"type": "function", "name": each["function"]["name"], "parameters": CITY} for each in TOOLS]
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    answer = tooled.client.responses.create(model=MODEL, input="Rome?", tools=tools, tool_choice=allowed, parallel_tool_calls=False)
    assert [getattr(item, "name", "") for item in answer.output] == ["now"]
    assert json.loads(answer.model_dump_json())["tool_choice"]["type"] == "allowed_tools"


def test_a_guess_at_the_answer_changes_nothing(tooled: Running) -> None:
    message, _ = ask(tooled, "Yes.", prediction={"type": "content", "content": "No."})
    assert message.content == "Yes."
