"""Chats as people write them who come from OpenAI, transformers or vLLM: one line each, on the model in the package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paged_attn
from paged_attn import LLM, ChatMessage, SamplingParams
from tests.server.serving import Running, serving

DEMO = Path(paged_attn.__file__).parent / "demo_model"
HELLO = [{"role": "user", "content": "It was a fine day."}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Bath", "Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bath"}}</tool_call>'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO, num_pages=512, compile=False) as made:
        yield made


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(lambda: LLM(DEMO, num_pages=512, compile=False).engine) as served:
        yield served
        served.wait_idle()


def test_a_chat_is_the_template_and_generate(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12)
    (answer,) = llm.chat(HELLO, params)
    text = llm.tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    (want,) = llm.generate([llm.tokenizer(text, add_special_tokens=False).input_ids], params)
    assert (answer.token_ids, answer.text, answer.finish_reason) == (want.token_ids, want.text, want.finish_reason)
    assert answer.message == ChatMessage(want.text)
    assert [each.text for each in llm.chat([HELLO, HELLO], sampling_params=params)] == [want.text] * 2


def test_a_conversation_goes_on_with_the_message_that_came(llm: LLM) -> None:
    (first,) = llm.chat(HELLO, SamplingParams(max_tokens=8))
    (second,) = llm.chat([*HELLO, first.message, {"role": "user", "content": "And then?"}], SamplingParams(max_tokens=8))
    assert second.prompt is not None and f"day.\n\n{first.text}\n\nAnd then?\n\n" in second.prompt
    assert second.cached_tokens > 0


def test_a_chat_comes_piece_by_piece(llm: LLM) -> None:
    events = list(llm.stream_chat(HELLO, SamplingParams(max_tokens=12)))
    text = "".join(event.part.text for event in events if event.part is not None)  # type: ignore[union-attr]
    assert text == llm.chat(HELLO, SamplingParams(max_tokens=12))[0].text and events[-1].finish_reason == "length"


def test_a_tool_is_called_and_answered(llm: LLM) -> None:
    def weather(city: str) -> str:
        """
        The weather of a city.

        Args:
            city: its name
        """
        return f"warm in {city}"

    forced = SamplingParams(regex=re.escape(CALL), max_tokens=100)
    (asked,) = llm.chat(HELLO, forced, tools=[weather])
    (call,) = asked.message.tool_calls
    assert (asked.finish_reason, call.name, json.loads(call.arguments)) == ("tool_calls", "weather", {"city": "Bath"})
    result = {"role": "tool", "tool_call_id": call.id, "content": weather(**json.loads(call.arguments))}
    (told,) = llm.chat([*HELLO, asked.message, result], SamplingParams(max_tokens=4), tools=[weather])
    assert told.prompt is not None and f"{CALL}\n\nwarm in Bath\n\n" in told.prompt


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_that_must_be_called_is(llm: LLM, choice: Any) -> None:
    (answer,) = llm.chat(HELLO, SamplingParams(max_tokens=200), tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    (call,) = answer.message.tool_calls
    assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Bath", "Rome") and answer.message.content is None


def test_another_template_and_its_variables(llm: LLM) -> None:
    template = "{{ messages[-1].content }} {{ mood }}"
    (answer,) = llm.chat(HELLO, SamplingParams(max_tokens=1), chat_template=template, chat_template_kwargs={"mood": "Glad."})
    assert answer.prompt == "It was a fine day. Glad."
    half = [*HELLO, {"role": "assistant", "content": "She said"}]
    (answer,) = llm.chat(half, SamplingParams(max_tokens=1), continue_final_message=True)
    assert answer.prompt is not None and answer.prompt.endswith("She said")
    (answer,) = llm.chat(HELLO, SamplingParams(max_tokens=1), add_generation_prompt=False)
    assert answer.prompt is not None and answer.prompt.endswith("day.")


def test_reasoning_apart_from_the_answer(llm: LLM) -> None:
    forced = SamplingParams(regex=re.escape("<think>Hm.</think>\n\nYes."), max_tokens=100)
    (answer,) = llm.chat(HELLO, forced, reasoning_parser="think")
    assert (answer.message.reasoning_content, answer.message.content) == ("Hm.", "Yes.")
    (answer,) = llm.chat(HELLO, forced)  # this template has no tags
    assert answer.message.content == "<think>Hm.</think>\n\nYes."


@pytest.mark.parametrize("stream", [False, True])
def test_the_demo_model_chats_and_calls_tools_over_http(running: Running, stream: bool) -> None:
    given: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 100, "temperature": 0, "tools": TOOLS, "tool_choice": "required"}
    if stream:
        with running.client.chat.completions.stream(**given, parallel_tool_calls=False) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = running.client.chat.completions.create(**given, parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.name == "weather"
