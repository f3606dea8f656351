"""gpt-oss's answers: messages of several channels, whole and cut at every place, and calls that are enforced."""

from __future__ import annotations

import time
from typing import Any

import pytest

from paged_attn import SamplingParams
from paged_attn.chat.answers.channels import ChannelReader
from paged_attn.chat.parts import ChatMessage, ToolCall
from paged_attn.chat.request import ChatRequest
from paged_attn.engine.requests.detokenizer import MarkedDecoder
from paged_attn.engine.sampling.structured.guides import Guides
from tests.chat.test_request import HELLO, NOW, WEATHER, tokenizer_with

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
TEMPLATE = (
    "{# <|channel|> developer .thinking #}{% for t in tools or [] %}{{ t.function.name }},{% endfor %}{% for m in messages %}"
    "<|start|>{{ m.role }}<|message|>{{ m.thinking or m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ANALYSIS = "<|channel|>analysis<|message|>Let me <see>.<|end|>"
NEXT = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
ROME = [("weather", '{"city": "Rome"}')]
ANSWERS: list[tuple[str, str | None, str | None, list[Any]]] = [
    (f"{ANALYSIS}{NEXT}<|channel|>final<|message|>It is 5 < 6.<|return|>", "Let me <see>.", "It is 5 < 6.", []),
    (f"{ANALYSIS}{NEXT}<|channel|>final<|message|>Cut he", "Let me <see>.", "Cut he", []),
    (f"{ANALYSIS}{NEXT}{CALL}<|call|>", "Let me <see>.", None, ROME),
    (f"{ANALYSIS}{NEXT}{CALL}", "Let me <see>.", None, ROME),  # the mark is an end token, which has no text
    (' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>', None, None, ROME),
    (f"{ANALYSIS}{NEXT} to=functions.now<|channel|>commentary<|message|><|call|>", "Let me <see>.", None, [("now", "{}")]),
    (f"{ANALYSIS}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}<|call|>", "Let me <see>.", "I look.", ROME),
    (f"{ANALYSIS}{NEXT}{ANALYSIS}{NEXT}<|channel|>final<|message|>A<|end|>{NEXT}<|channel|>final<|message|>B",
     "Let me <see>.\n\nLet me <see>.", "A\n\nB", []),
    (f"{CALL[:-1]}<|call|>", None, f"{CALL[:-1]}<|call|>", []),
    (CALL[:-3], None, CALL[:-3], []),
    (CALL.replace("functions.weather", "python") + "<|call|>", None, CALL.replace("functions.weather", "python") + "<|call|>", []),
    ("<|channel|>analysis<|message|>Hm<|start|>assistant<|channel|>final<|message|>Yes", "Hm", "Yes", []),
    ("<|channel|>analysis", None, "", []),
    ('{"x": 1}', None, '{"x": 1}', []),
    ("Plain <|channel|>final<|message|>text", None, "Plain \n\ntext", []),
    ("", None, "", []),
]  # fmt: skip


def read(text: str, size: int, **settings: Any) -> ChatMessage:
    reader = ChannelReader(**{"prompt": NEXT, "has_tools": True, "most": None, **settings})
    parts = [part for start in range(0, len(text), size) for part in reader.feed(text[start : start + size])]
    return ChatMessage.of(parts + reader.finish())


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), ANSWERS)
def test_messages_are_told_apart_however_the_text_is_cut(text: str, reasoning: str | None, content: str | None, calls: list[Any]) -> None:
    for size in (1000, 1, 2, 3, 7, 11):
        message = read(text, size)
        assert (message.reasoning_content, message.content) == (reasoning, content), size
        assert [(call.name, call.arguments) for call in message.tool_calls] == calls


def test_calls_that_may_not_be_are_content_and_so_is_what_a_prompt_began() -> None:
    twice = f"{CALL}<|call|>{NEXT}{CALL}<|call|>"
    for size in (1000, 1, 5):
        assert len((one := read(twice, size, most=1)).tool_calls) == 1 and (one.content or "").endswith("<|call|>")
        none = read(twice, size, has_tools=False)
        assert not none.tool_calls and none.content == f"{CALL}<|call|>\n\n<|start|>assistant{CALL}<|call|>"
    begun = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>{}<|message|>So"
    assert read(" it is", 2, prompt=begun.format("final")) == ChatMessage(" it is")
    assert read(" it is", 2, prompt=begun.format("analysis")) == ChatMessage("", " it is")


def test_a_long_call_takes_time_in_proportion() -> None:
    reader = ChannelReader(NEXT, True, None)
    reader.feed(CALL[:-1])
    started = time.perf_counter()
    for _ in range(20_000):
        assert not reader.feed(', "a": [1]')
    assert time.perf_counter() - started < 5
    assert [part.name for part in reader.feed("}<|call|>") if isinstance(part, ToolCall)] == ["weather"]


def test_a_template_with_channels_is_read_by_them() -> None:
    own = tokenizer_with(TEMPLATE, *MARKS)
    asked = ChatRequest(HELLO, [WEATHER]).prompt(own)
    assert asked.text.endswith("<|start|>assistant") and asked.form.channels and len(asked.form.kept) == len(MARKS)
    assert asked.form.read(f"{ANALYSIS}{NEXT}{CALL}").tool_calls[0].name == "weather"
    assert not ChatRequest(HELLO, [WEATHER], tool_parser="none").prompt(own).form.read(CALL).tool_calls
    assert ChatRequest(HELLO, tool_parser="harmony").prompt(tokenizer_with("{{ messages[0].content }}")).form.channels
    assert not ChatRequest(HELLO, reasoning_parser="think").prompt(own).form.channels
    guided = ChatRequest(HELLO).prompt(own, ("regex", "a+"))
    assert guided.text.endswith("<|start|>assistant<|channel|>final<|message|>") and guided.form.read("aa") == ChatMessage("aa")
    history = [*HELLO, ChatMessage(None, "Let me see.", asked.form.read(CALL).tool_calls)]
    assert "<|start|>assistant<|message|>Let me see.<|end|>" in ChatRequest(history, [WEATHER]).prompt(own).text


@pytest.mark.parametrize("marks", [MARKS, ()], ids=["tokens", "text"])
@pytest.mark.parametrize("schema", [False, True])
def test_an_enforced_call_is_one_that_is_read(marks: tuple[str, ...], schema: bool) -> None:
    tokenizer = tokenizer_with(TEMPLATE, *marks)
    guide = ("json_schema", '{"type": "object", "properties": {"x": {"const": 1}}, "additionalProperties": false}') if schema else None
    form = ChatRequest(HELLO, [WEATHER, NOW], None if schema else "required").prompt(tokenizer, guide).form
    final = '<|channel|>final<|message|>{"x": 1}'
    texts = {f"{ANALYSIS}{NEXT}{CALL}": True, CALL: True, final: schema, CALL.replace("Rome", "Paris"): False, "Hello": False}
    guides = Guides(tokenizer, len(tokenizer), frozenset())
    try:
        for text, fits in texts.items():
            found = guides.guide(form.enforced(SamplingParams(json_schema=None if guide is None else guide[1])))
            ids = tokenizer(text, add_special_tokens=False).input_ids
            assert found is not None and (found.matcher.validate_tokens(ids) == len(ids)) is fits, text
            if fits and text != final:
                told = form.read(MarkedDecoder(tokenizer, form.kept).decode(ids, skip_special_tokens=True))
                assert [(call.name, call.arguments) for call in told.tool_calls] == ROME
    finally:
        guides.close()
