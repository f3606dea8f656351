"""Answers taken apart: every format of calls, reasoning, whole and cut at every place; nothing of an answer is lost."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.chat.answers.answer_form import AnswerForm
from paged_attn.chat.answers.reasoning import TAGS
from paged_attn.chat.formats.choose import FORMATS
from paged_attn.chat.formats.section import SEPARATOR, DeepSeekFormat
from paged_attn.chat.formats.tagged import argument_value
from paged_attn.chat.formats.tool_format import as_text
from paged_attn.chat.parts import ChatMessage
from paged_attn.chat.tools import checked_tools

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = checked_tools([
    {"type": "function", "function": {"name": "weather", "parameters": CITY}}, {"type": "function", "function": {"name": "now"}},
])  # fmt: skip
PARIS = ("weather", {"city": "Paris", "days": 3})
NOW = ("now", {})


def form(name: str | None, most: int | None = None, **settings: Any) -> AnswerForm:
    return AnswerForm(format=None if name is None else FORMATS[name](TOOLS), most_calls=most, **settings)


def streamed(given_form: AnswerForm, pieces: list[str]) -> ChatMessage:
    reader = given_form.reader()
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return ChatMessage.of(parts + reader.finish())


def plain(message: ChatMessage) -> tuple[str | None, list[tuple[str, Any]]]:
    return message.content, [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


WEATHER = '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}'
LLAMA = '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}'
ARGUMENTS = '{"city": "Paris", "days": 3}'
SECTION, CALL = DeepSeekFormat.section, DeepSeekFormat.each
FENCED = f"{CALL[0]}function{SEPARATOR}weather\n```json\n{ARGUMENTS}\n```{CALL[1]}"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>"
ANSWERS: list[tuple[str, str, str | None, list[tuple[str, Any]]]] = [
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", None, [PARIS]),
    ("hermes", f"Let me see.\n<tool_call>{WEATHER}</tool_call>\n<tool_call>{{\"name\": \"now\"}}</tool_call>", "Let me see.", [PARIS, NOW]),
    ("hermes", f"<tool_call>{WEATHER}", None, [PARIS]),
    ("hermes", f"<tool_call>{WEATHER[:-3]}", f"<tool_call>{WEATHER[:-3]}", []),
    ("hermes", "<tool_call>{bad}</tool_call> so", "<tool_call>{bad}</tool_call> so", []),
    ("hermes", f"<tool_call>{{bad}}</tool_call><tool_call>{WEATHER}</tool_call>", "<tool_call>{bad}</tool_call>", [PARIS]),
    ("hermes", "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    ("hermes", '<tool_call>{"name": "now", "arguments": 5}</tool_call>', '<tool_call>{"name": "now", "arguments": 5}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "</tool_call>"}}</tool_call>', None, [("a", {"x": "</tool_call>"})]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "1\n2"}}</tool_call>', None, [("a", {"x": "1\n2"})]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', None, [("a", {"x": "?"})]),
    ("hermes", "a < b and <tool", "a < b and <tool", []),
    ("hermes", " plain \n", " plain \n", []),
    ("hermes", "", "", []),
    ("qwen_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
     "</function>\n</tool_call>", None, [PARIS]),
    ("seed_oss", "So <seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n"
     "</function>\n</seed:tool_call>", "So", [PARIS]),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
     "</tool_call>\n<tool_call>now\n</tool_call>", None, [PARIS, NOW]),
    ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3</arg_value>"
     "</tool_call>", None, [PARIS]),
    ("glm", "<tool_call>so it is</tool_call>", "<tool_call>so it is</tool_call>", []),
    ("qwen_coder", "<tool_call><function=now>x</function></tool_call>", "<tool_call><function=now>x</function></tool_call>", []),
    ("llama3", LLAMA, None, [PARIS]),
    ("llama3", f"<|python_tag|>{LLAMA}; " + '{"name": "now", "parameters": {}}', None, [PARIS, NOW]),
    ("llama3", '{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}', []),
    ("llama3", '{"answer": 5} is it', '{"answer": 5} is it', []),
    ("llama3", f"So: {LLAMA}", f"So: {LLAMA}", []),
    ("mistral", f'[TOOL_CALLS][{WEATHER}, {{"name": "now", "arguments": {{}}}}]', None, [PARIS, NOW]),
    ("mistral", 'Well [TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[CALL_ID]abc12XYZ[ARGS]{}', "Well", [PARIS, NOW]),
    ("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    ("mistral", "[TOOL_CALLS]2fa_send[ARGS]{}[TOOL_CALLS]null_check[ARGS]{}", None, [("2fa_send", {}), ("null_check", {})]),
    ("pythonic", '[weather(city="Paris", days=3), now()]', None, [PARIS, NOW]),
    ("pythonic", "<|python_start|>[weather(city='Paris', days=3)]<|python_end|>", None, [PARIS]),
    ("pythonic", "[weather(city=Paris)]", "[weather(city=Paris)]", []),
    ("pythonic", "[1, 2] are numbers", "[1, 2] are numbers", []),
    ("pythonic", "[" * 60 + "]" * 60, "[" * 60 + "]" * 60, []),
    ("pythonic", '[now(), weather(city="a]b")', '[now(), weather(city="a]b")', []),
    ("minimax", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
     '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>', None, [PARIS, NOW]),
    ("minimax", "<minimax:tool_call>now</minimax:tool_call>", "<minimax:tool_call>now</minimax:tool_call>", []),
    ("deepseek", f"So{SECTION[0]}{CALL[0]}weather{SEPARATOR}{ARGUMENTS}{CALL[1]}{CALL[0]}now{SEPARATOR}{{}}{CALL[1]}{SECTION[1]}", "So",
     [PARIS, NOW]),
    ("deepseek_v3", f"{SECTION[0]}{FENCED}\n{FENCED}{SECTION[1]}", None, [PARIS, PARIS]),
    ("deepseek", f"{CALL[0]}now{SEPARATOR}{{}}{CALL[1]} it is", "it is", [NOW]),
    ("deepseek", f"{SECTION[0]}{CALL[0]}now{SEPARATOR}{{}}", None, [NOW]),
    ("deepseek", f"{SECTION[0]}{CALL[0]}now{CALL[1]}{SECTION[1]}", f"{SECTION[0]}{CALL[0]}now{CALL[1]}{SECTION[1]}", []),
    ("kimi_k2", f"{KIMI}functions.weather:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
     "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", None, [PARIS, NOW]),
    ("kimi_k2", f"{KIMI}now<|tool_call_end|>", f"{KIMI}now<|tool_call_end|>", []),
    ("json", f"[{WEATHER}]", None, [PARIS]),
    ("json", '{"city": "Paris"}', '{"city": "Paris"}', []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS, ids=[f"{name}-{text[:24]!r}" for name, text, _, _ in ANSWERS])
def test_calls_are_found_and_the_rest_is_kept_however_the_text_is_cut(name: str, text: str, content: str | None, calls: list[Any]) -> None:
    if "1e999" in text:  # no JSON can carry it back
        content, calls = text, []
    assert plain(form(name).read(text)) == (content, calls)
    for size in (1, 2, 3, 7, 50):
        assert plain(streamed(form(name), [text[i : i + size] for i in range(0, len(text), size)])) == (content, calls)


def test_a_call_of_kimi_keeps_its_own_id() -> None:
    answer = form("kimi_k2").read(f"{KIMI}functions.now:7<|tool_call_argument_begin|>{{}}<|tool_call_end|>")
    assert [(call.id, call.name) for call in answer.tool_calls] == [("functions.now:7", "now")]
    twice = form("kimi_k2").read(f"{KIMI}functions.now:7<|tool_call_argument_begin|>{{}}<|tool_call_end|>" * 2).tool_calls
    (without,) = form("kimi_k2").read(f"{KIMI}now<|tool_call_argument_begin|>{{}}<|tool_call_end|>").tool_calls
    assert twice[0].id == "functions.now:7" and {twice[1].id[:5], without.id[:5]} == {"call_"}


def test_a_call_without_a_section_and_the_text_behind_it_come_at_once() -> None:
    reader = form("deepseek").reader()
    parts = [*reader.feed(f"{CALL[0]}now{SEPARATOR}{{}}{CALL[1]}"), *reader.feed(" And so on")]
    assert plain(ChatMessage.of(parts)) == ("And so on", [NOW])


@pytest.mark.parametrize(
    ("name", "begin", "more"),
    [
        ("minimax", '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter>', "\n"),
        ("qwen_coder", "<tool_call><function=f>", " "), ("minimax", "<minimax:tool_call>", '<invoke name="a">'),
        ("deepseek", SECTION[0], f"{CALL[0]}f{SEPARATOR}{{}}{CALL[1]}"),
    ],
)  # fmt: skip
def test_what_goes_on_for_ever_is_read_in_proportion_to_its_length(name: str, begin: str, more: str) -> None:
    """64,000 characters took more than ten seconds where a pattern looked at each space for what follows all of them."""
    text = begin + more * (64_000 // len(more)) + ("</function></tool_call>" if name == "qwen_coder" else "")
    started = time.process_time()
    streamed(form(name), [text[i : i + 50] for i in range(0, len(text), 50)])
    assert time.process_time() - started < 4


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_holds_no_call_comes_out_as_it_went_in(name: str, data: st.DataObject) -> None:
    marks = [
        *FORMATS[name].openings,
        *FORMATS[name].marks,
        "<",
        "[",
        "{",
        "}",
        "]",
        '"',
        " ",
        "\n",
        "a",
        "é",
        "weather",
        "(",
        ")",
        "</tool",
    ]
    pieces = data.draw(st.lists(st.sampled_from(marks), max_size=30))
    whole, cut = form(name).read("".join(pieces)), streamed(form(name), pieces)
    assert plain(whole) == plain(cut)
    if not whole.tool_calls:
        assert whole.content == "".join(pieces)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nhm <b>\n</think>\n\nYes ", False, "hm <b>", "Yes "),
        ("hm</think>Yes", True, "hm", "Yes"),
        ("\nhm", True, "hm", ""),
        ("<think>hm </thin", False, "hm </thin", ""),
        ("<think></think>Yes", False, None, "Yes"),
        (" \nYes <think>no</think>", False, None, " \nYes <think>no</think>"),
        ("<thi", False, None, "<thi"),
        ("", False, None, ""),
    ],
)
def test_reasoning_is_apart_from_content(text: str, inside: bool, reasoning: str | None, content: str) -> None:
    by_tags = form(None, tags=TAGS["think"], starts_inside=inside)
    for pieces in ([text], list(text)):
        message = streamed(by_tags, pieces)
        assert (message.reasoning_content, message.content) == (reasoning, content)


def test_a_call_follows_reasoning_and_one_inside_it_is_thought() -> None:
    text = f"<think>try <tool_call>{WEATHER}</tool_call></think>\n\n<tool_call>{WEATHER}</tool_call>"
    message = form("hermes", tags=TAGS["think"]).read(text)
    assert plain(message) == (None, [PARIS]) and message.reasoning_content == f"try <tool_call>{WEATHER}</tool_call>"


def test_only_so_many_calls_as_may_be_and_the_rest_as_content() -> None:
    call = f"<tool_call>{WEATHER}</tool_call>"
    assert plain(form("hermes", most=1).read(call * 2)) == (call, [PARIS])
    for name, text in (
        ("mistral", f"[TOOL_CALLS][{WEATHER}, {WEATHER}]"),
        ("pythonic", '[weather(city="Paris", days=3), weather(city="Paris", days=3)]'),
    ):
        for message in (form(name, most=1).read(text), streamed(form(name, most=1), list(text))):
            content, calls = plain(message)
            assert calls == [PARIS] and json.loads(str(content)) == [json.loads(WEATHER)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": "x\ny"}', {"a": "x\ny"}), ('{"a": "\\ud83d"}', {"a": "\ud83d"}), ('{"a": NaN}', None), ("[1]", None), ("null", None)],
)
def test_arguments_written_as_a_string_are_json_for_everybody_or_no_call(arguments: str, expected: dict[str, Any] | None) -> None:
    text = as_text(arguments)
    assert (None if text is None else json.loads(text.encode())) == expected


def test_ids_differ_and_mistrals_are_of_nine_letters() -> None:
    ids = [call.id for name, text in (("hermes", f"<tool_call>{WEATHER}</tool_call>"), ("mistral", f"[TOOL_CALLS][{WEATHER}]"))
           for _ in range(2) for call in form(name).read(text).tool_calls]  # fmt: skip
    assert len(set(ids)) == 4 and ids[0].startswith("call_") and len(ids[2]) == 9 and ids[2].isalnum()


@pytest.mark.parametrize(("name", "unit"), [("pythonic", "a=[],"), ("hermes", "</tool_call>"), ("json", '{"a":[]},')])
def test_a_long_call_that_never_ends_takes_time_in_proportion(name: str, unit: str) -> None:
    """40,000 characters, in pieces as small as tokens; looking at all of them each time would take a minute."""
    opening = {"pythonic": "[now(", "hermes": '<tool_call>"', "json": "["}[name]
    pieces = [opening, *[unit] * (40_000 // len(unit))]
    started = time.process_time()
    message = streamed(form(name), pieces)
    assert message.content == "".join(pieces) and time.process_time() - started < 5


def test_text_is_told_as_soon_as_it_can_be_no_mark() -> None:
    reader = form("hermes", tags=TAGS["think"]).reader()
    told = [[part.text for part in reader.feed(piece)] for piece in ["Hel", "lo ", "<too", "th>", " x"]]  # type: ignore[union-attr]
    assert told == [["Hel"], ["lo"], [], [" <tooth>"], [" x"]]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "3", 3), ({"type": "integer"}, "three", "three"), ({"type": "string"}, "3", "3"), (None, "3", "3"),
        ({}, "3", "3"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3), ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "3", "3"), ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["boolean", "null"]}, "True", True), ({"type": "boolean", "nullable": True}, "null", None),
        ({"type": "string"}, "null", "null"),
        ({"$ref": "#/$defs/W"}, '{"x": "True"}', {"x": "True"}), ({"$ref": "#/$defs/loop"}, "3", "3"), ({"$ref": "#/none/such"}, "3", "3"),
        ({"enum": [1, 2]}, "2", 2), ({"const": "2"}, "2", "2"), ({"allOf": [{"$ref": "#/$defs/W"}]}, '{"x": 1}', {"x": 1}),
    ],
)  # fmt: skip
def test_values_written_as_text_are_what_the_schema_says(schema: Any, text: str, value: Any) -> None:
    loop = {"$ref": "#/$defs/loop"}
    parameters = {"properties": {"key": schema}, "$defs": {"W": {"type": "object", "properties": {}}, "loop": loop}}
    (tool,) = checked_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    found = argument_value(text, tool, "key")
    assert found == value and type(found) is type(value)
