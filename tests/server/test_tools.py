"""Tools and reasoning over HTTP, with OpenAI's own client: asked for, enforced, streamed and not. What the model says is forced by an
expression, as a tiny model calls nothing by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.engine.models import make_engine
from tests.server.serving import MODEL, Running, chat_tokenizer, serving
from tests.server.test_bad_requests import post

HELLO: list[Any] = [{"role": "user", "content": "Rome?"}]
SAYS_TOOLS = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
SAYS_ALL = (
    SAYS_TOOLS + "{% for m in messages %}{{ m.role }}{{ m.tool_call_id }}>{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}a>{% endif %}{# <think></think> #}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "description": "the time"}},
]
ROME = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def tooled() -> Iterator[Running]:
    own = chat_tokenizer()
    own.chat_template = SAYS_ALL
    with serving(lambda: make_engine(tokenizer=own)) as running:
        yield running
        running.wait_idle()


def ask(running: Running, text: str | None = None, stream: bool = False, messages: Any = HELLO, **settings: Any) -> tuple[Any, str]:
    """The message, whole or put together by OpenAI's client, and why it ended."""
    extra = {} if text is None else {"regex": re.escape(text)}
    given = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 200, **settings}
    if not stream:
        choice = running.client.chat.completions.create(**given, extra_body=extra).choices[0]
        return choice.message, choice.finish_reason
    with running.client.chat.completions.stream(**given, extra_body=extra) as events:
        for _ in events:
            pass
        choice = events.get_final_completion().choices[0]
    return choice.message, choice.finish_reason


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@BOTH
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (ROME, None, [("weather", {"city": "Rome"})]),
        (f"Let me see. {ROME} {NOW}", "Let me see.", [("weather", {"city": "Rome"}), ("now", {})]),
        ("It is warm.", "It is warm.", []),
        (ROME.replace("Rome", "\\ud83d"), None, [("weather", {"city": "\ud83d"})]),  # half an emoji, which UTF-8 cannot carry
        (ROME.replace("weather", "\\ud83d"), ROME.replace("weather", "\\ud83d"), []),
        ("<tool_call>{bad}</tool_call>", "<tool_call>{bad}</tool_call>", []),
        (f"{NOW}<tool_call>{{bad", "<tool_call>{bad", [("now", {})]),
    ],
)
def test_calls_that_the_model_makes(tooled: Running, text: str, content: str | None, calls: list[Any], stream: bool) -> None:
    message, reason = ask(tooled, text, stream, tools=TOOLS)
    assert (message.content or None, calls_of(message), reason) == (content, calls, "tool_calls" if calls else "stop")
    assert len({call.id for call in message.tool_calls or []}) == len(calls)


@BOTH
def test_an_answer_cut_in_the_middle_of_a_call_is_content(tooled: Running, stream: bool) -> None:
    given = {
        "model": MODEL,
        "messages": HELLO,
        "temperature": 0,
        "max_tokens": 30,
        "tools": TOOLS,
        "extra_body": {"regex": re.escape(ROME)},
    }
    got = tooled.client.chat.completions.create(**given, stream=stream)  # its `stream` would raise for an answer that is cut
    choices = [choice for chunk in got for choice in chunk.choices] if stream else got.choices
    text = "".join(choice.delta.content or "" for choice in choices) if stream else choices[0].message.content
    assert (text, choices[-1].finish_reason) == (ROME[:30], "length")


@BOTH
def test_one_call_alone_where_several_are_not_wanted(tooled: Running, stream: bool) -> None:
    message, _ = ask(tooled, ROME + NOW, stream, tools=TOOLS, parallel_tool_calls=False)
    assert (message.content, calls_of(message)) == (NOW, [("weather", {"city": "Rome"})])


@BOTH
def test_a_named_tool_and_any_tool_are_enforced(tooled: Running, stream: bool) -> None:
    message, reason = ask(tooled, None, stream, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
    ((name, arguments),) = calls_of(message)
    assert name == "weather" and arguments["city"] in ("Rome", "Oslo") and reason == "tool_calls"
    message, reason = ask(tooled, None, stream, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert len(calls_of(message)) == 1 and reason == "tool_calls"
    untyped = {name: CITY[name] for name in ("properties", "required")}
    for schema in (untyped, {"$ref": "#/$defs/Where", "$defs": {"Where": untyped}}):
        said_less = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
        message, _ = ask(tooled, None, stream, tools=said_less, tool_choice="required", parallel_tool_calls=False)
        ((_, arguments),) = calls_of(message)
        assert arguments["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("more", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_what_no_enforced_call_can_have_is_named(tooled: Running, more: dict[str, Any]) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", **more}
    reply = tooled.http.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools"), reply.text
    assert f"{next(iter(more))}: got" in reply.json()["error"]["message"]


@BOTH
def test_no_tools_are_shown_and_no_calls_read_where_none_are_wanted(tooled: Running, stream: bool) -> None:
    message, reason = ask(tooled, ROME, stream, tools=TOOLS, tool_choice="none")
    assert (message.content, message.tool_calls or [], reason) == (ROME, [], "stop")
    shown = [prompt_of(tooled, tools=TOOLS, tool_choice=choice) for choice in ("auto", "none")]
    assert shown == ["weather now user>Rome?;a>", "user>Rome?;a>"]


def prompt_of(running: Running, **settings: Any) -> str:
    body = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True, **settings}
    reply = running.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(chat_tokenizer().decode(reply.json()["choices"][0]["prompt_token_ids"]))


@BOTH
def test_calls_and_their_results_go_back_into_the_template(tooled: Running, stream: bool) -> None:
    message, _ = ask(tooled, f"<think>Hm.</think>{ROME}", stream, tools=TOOLS)
    assert message.reasoning_content == "Hm."
    result = {"role": "tool", "tool_call_id": "c7", "content": "warm"}
    told = prompt_of(tooled, messages=[*HELLO, message.model_dump(exclude={"parsed"}), result])
    assert told == "user>Rome?;assistant>Hm.<tool_call>weatherRome;toolc7>warm;a>"


@BOTH
def test_reasoning_comes_apart(tooled: Running, stream: bool) -> None:
    got = tooled.client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=stream, extra_body={"regex": re.escape("<think>One. Two.</think> Three.")}
    )
    if stream:
        deltas = [choice.delta for chunk in got for choice in chunk.choices]
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        reasoning, content = got.choices[0].message.reasoning_content, got.choices[0].message.content
    assert (reasoning, content) == ("One. Two.", "Three.")


def test_settings_of_the_end_of_the_prompt(tooled: Running) -> None:
    answer = [*HELLO, {"role": "assistant", "content": "It is"}]
    assert prompt_of(tooled, add_generation_prompt=False) == "user>Rome?;"
    assert prompt_of(tooled, messages=answer, continue_final_message=True) == "user>Rome?;assistant>It is"


class Weather(BaseModel):
    city: str


@BOTH
def test_openais_parse_gives_objects(tooled: Running, stream: bool) -> None:
    """Tools of pydantic classes, and an answer of one beside tools: a call or the answer."""
    tools = [openai.pydantic_function_tool(Weather)]
    completions = tooled.client.chat.completions
    given: Any = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 250, "tools": tools}
    call = {"regex": re.escape('<tool_call>{"name": "Weather", "arguments": {"city": "Rome"}}</tool_call>')}
    if stream:
        with completions.stream(**given, extra_body=call) as events:
            parsed = events.get_final_completion().choices[0].message
    else:
        parsed = completions.parse(**given, extra_body=call).choices[0].message
    assert parsed.tool_calls[0].function.parsed_arguments == Weather(city="Rome")


def test_openais_parse_of_an_answer_beside_tools(tooled: Running) -> None:
    class Short(BaseModel):
        """Says one thing only."""

        model_config = {"json_schema_extra": {"properties": {"yes": {"const": True}}}}
        yes: bool

    tools = [openai.pydantic_function_tool(Weather)]
    bias = {str(chat_tokenizer().encode("<")[0]): -100}  # not a call
    given: Any = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 100, "tools": tools, "response_format": Short}
    parsed = tooled.client.chat.completions.parse(**given, logit_bias=bias).choices[0].message
    assert parsed.parsed == Short(yes=True) and not parsed.tool_calls


def test_each_of_several_answers_has_its_own_calls(tooled: Running) -> None:
    given: Any = {"model": MODEL, "messages": HELLO, "n": 2, "tools": TOOLS, "extra_body": {"regex": re.escape(ROME)}}
    whole = tooled.client.chat.completions.create(**given)
    assert [calls_of(choice.message) for choice in whole.choices] == [[("weather", {"city": "Rome"})]] * 2
    chunks = [choice for chunk in tooled.client.chat.completions.create(**given, stream=True) for choice in chunk.choices]
    assert sorted(choice.index for choice in chunks if choice.delta.tool_calls) == [0, 1]
    assert {choice.delta.tool_calls[0].index for choice in chunks if choice.delta.tool_calls} == {0}


@pytest.mark.parametrize(
    ("bad", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0", "allowed:"),
        ({"tools": [1]}, "tools.0", "valid dictionary"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice", "got 5"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "got 'maybe'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "no tool is called 'x'"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "tool_choice", "beside regex"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}}, "tool_choice",
         'allowed: {"mode": "auto" or "required"'),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}},
         "tool_choice", "no tool is called 'x'; tools given: weather, now"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}}, "tool_choice",
         "no tool is called None; tools given: weather, now"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}], "tool_choice": "required"}, "tools",
         "cannot be enforced"),
        ({"functions": [1]}, "functions", "give tools"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", "give one of them"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
    ],
)  # fmt: skip
def test_what_can_not_be_asked_for(tooled: Running, bad: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        status, error = post(tooled, "/v1/chat/completions", {"messages": HELLO, "stream": stream, **bad})
        assert (status, error["param"]) == (400, param) and words in error["message"], error


def test_completions_have_no_tools(tooled: Running) -> None:
    status, error = post(tooled, "/v1/completions", {"prompt": "a", "tools": TOOLS})
    assert (status, error["param"]) == (400, "tools") and "only chats have them" in error["message"]


def test_a_template_without_tools_is_told_before_a_model_that_never_hears_of_them(running: Running) -> None:
    status, error = post(running, "/v1/chat/completions", {"messages": HELLO, "tools": TOOLS})
    assert (status, error["code"]) == (400, "no_tools_in_template") and "--chat-template" in error["message"]
    message, _ = ask(running, None, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert len(calls_of(message)) == 1


def test_the_servers_parsers() -> None:
    with serving(lambda: make_engine(tokenizer=chat_tokenizer()), reasoning_parser="think") as running:
        message, _ = ask(running, "<think>Hm.</think>So.")
        assert (message.reasoning_content, message.content) == ("Hm.", "So.")
    with pytest.raises(ValueError, match="tool_parser is 'x'; allowed are auto, none, hermes"), serving(tool_parser="x"):
        pass
