"""From messages and tools to a prompt: what templates get, what is enforced, and what is refused with a reason."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from tokenizers import AddedToken

from paged_attn import LLM, SamplingParams
from paged_attn.chat.errors import ChatError
from paged_attn.chat.formats.choose import FORMATS, format_of
from paged_attn.chat.formats.section import SEPARATOR, DeepSeekFormat, FencedDeepSeekFormat, KimiFormat, SectionFormat
from paged_attn.chat.messages import MAX_ARGUMENT_VALUES, plain_messages
from paged_attn.chat.parts import ChatMessage, ToolCall
from paged_attn.chat.request import ChatPrompt, ChatRequest
from paged_attn.chat.template import read_template
from paged_attn.chat.tools import checked_tools
from paged_attn.engine.requests.detokenizer import MarkedDecoder
from paged_attn.engine.sampling.structured.guides import Guides
from tests.engine.models import make_llm
from tests.server.serving import TEMPLATE, chat_tokenizer
from tests.tiny_models import build

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome"]}},
           "required": ["city"]}}}  # fmt: skip
NOW = {"type": "function", "function": {"name": "now"}}
SHOWS_TOOLS = TEMPLATE + "{% for t in tools or [] %}{{ t.function.name }},{% endfor %}"


def tokenizer_with(template: str, *special: str, added: tuple[str, ...] = ()) -> Any:
    own = copy.deepcopy(chat_tokenizer())
    own.chat_template = template
    own.add_tokens([AddedToken(text, special=True) for text in special] + [AddedToken(text) for text in added], special_tokens=False)
    return own


def prompt(messages: Any = HELLO, template: str = SHOWS_TOOLS + "{# <tool_call> #}", guide: Any = None, **settings: Any) -> ChatPrompt:
    return ChatRequest(messages, **settings).prompt(tokenizer_with(template), guide)


def test_messages_reach_the_template_as_it_expects_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": [1]}'}}
    given = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann", "audio": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "reasoning_content": "hm"},
        {"role": "tool", "content": "12:00", "tool_call_id": "c1"},
        ChatMessage(None, None, (ToolCall("c2", "now", "{}"),)),
    ]
    inner = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"a": [1]}}}
    assert plain_messages(given) == [
        {"role": "user", "name": "Ann", "content": "ab"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [inner], "content": ""},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}}],
            "content": "",
        },
    ]


def test_a_template_may_know_a_role_of_its_own() -> None:
    critic = [{"role": "critic", "content": "a"}]
    names, writes = "{% if m.role == 'critic' %}", "{{ '<|im_start|>' + m['role'] + m.content }}"
    assert plain_messages(critic, names) == plain_messages(critic, writes) == critic
    for role, template in (("critic", "{% if m.role == 'user' %}a critic{% endif %}"), ("", writes), ("e", names)):
        with pytest.raises(ChatError, match="and what the template knows"):
            plain_messages([{"role": role, "content": "a"}], template)


def with_arguments(arguments: Any) -> list[Any]:
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        (["Hello"], "messages.0", "allowed: a mapping with role and content"),
        ([{"role": "assistant"}], "messages.0.content", "allowed: a text"),
        ([*HELLO, {"role": "asistant", "content": "a"}], "messages.1.role", "got 'asistant'; allowed: system, developer, user, assistant"),
        ([{"role": "tool", "content": "a", "tool_call_id": 5}], "messages.0.tool_call_id", "got 5"),
        ([{"role": "user", "content": "a", "reasoning_content": "b"}], "messages.0.reasoning_content", "of role 'assistant' only"),
        ([{"role": "user", "content": "a", "reasoning": "b"}], "messages.0.reasoning", "of role 'assistant' only"),
        ([{"role": "assistant", "content": "a", "reasoning": 5}], "messages.0.reasoning", "got 5; allowed: a text"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages.0.tool_calls.0", "got 5"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages.0.tool_calls", "a list of calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}] * 129}], "messages.0.tool_calls", "129 calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages.0.tool_calls.0.function.name", "got None"),
        (with_arguments("{"), "messages.0.tool_calls.0.function.arguments", "no JSON"),
        (with_arguments("[1]"), "messages.0.tool_calls.0.function.arguments", "allowed: a JSON object"),
        (with_arguments("[" * 100_000), "messages.0.tool_calls.0.function.arguments", "more than 65,536 values"),
        (with_arguments("[" * 50_000), "messages.0.tool_calls.0.function.arguments", "no JSON"),
        (with_arguments("[" + "1," * MAX_ARGUMENT_VALUES), "messages.0.tool_calls.0.function.arguments", "leave old calls out"),
    ],
)
def test_a_bad_message_is_refused_with_its_place(messages: Any, param: str, words: str) -> None:
    with pytest.raises(ChatError, match=re.escape(words)) as raised:
        plain_messages(messages)
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("settings", "param", "words"),
    [
        ({"tools": {"a": 1}}, "tools", "allowed: a list of tools"),
        ({"tools": [5]}, "tools.0", "got 5"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "web_search"),
        ({"tools": [{"function": {"name": 'a" b'}}]}, "tools.0.function.name", "letters, digits"),
        ({"tools": [{"function": {"name": "a", "parameters": []}}]}, "tools.0.function.parameters", "a JSON schema"),
        ({"tools": [NOW, NOW]}, "tools", "two of them are called 'now'"),
        ({"tools": [NOW] * 129}, "tools", "129 tools"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", "got 'any'; allowed: none, auto, required"),
        ({"tools": [NOW], "tool_choice": {"function": {"name": "x"}}}, "tool_choice", "no tool is called 'x'; tools given: now"),
        ({"tools": [NOW], "tool_choice": "required", "guide": ("regex", "a")}, "tool_choice", "beside regex"),
        ({"tools": [NOW], "tool_parser": "other"}, "tool_parser", "allowed: auto, none, hermes"),
        ({"reasoning_parser": "other"}, "reasoning_parser", "allowed: auto, none, think"),
        ({"tools": [NOW], "template": TEMPLATE}, "tools", "has no place for tools"),
        ({"tools": [NOW], "template": SHOWS_TOOLS}, "tools", "does not show in which format the model calls tools"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "may not hold tools"),
        ({"chat_template": "{{ raise_exception('No system') }}"}, "messages", "chat template refuses the messages: No system"),
        ({"chat_template": "{% endfoor %}"}, "chat_template", "Jinja cannot read the model's chat template: Encountered unknown tag"),
        ({"chat_template": "{{ 1 | nofilter }}"}, "chat_template", "No filter named 'nofilter'. in line 1; give another"),
    ],
)
def test_bad_settings_are_refused_with_their_name(settings: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ChatError, match=re.escape(words)) as raised:
        prompt(**settings)
    assert raised.value.param == param


def test_python_functions_are_tools() -> None:
    def weather(city: str, days: int = 1) -> str:
        """
        The weather.

        Args:
            city: where
            days: how many
        """
        return city

    (tool,) = checked_tools([weather])
    assert tool.name == "weather" and tool.parameters["required"] == ["city"]
    with pytest.raises(ChatError, match="cannot be described"):
        checked_tools([lambda x: x])


def test_none_shows_no_tools_and_reads_no_calls() -> None:
    assert "now," in prompt(tools=[NOW]).text
    hidden = prompt(tools=[NOW], tool_choice="none")
    assert "now," not in hidden.text and hidden.form.format is None


def test_the_end_of_the_prompt() -> None:
    assert prompt().text.endswith("; assistant>")
    assert prompt(add_generation_prompt=False).text.endswith("Hello; ")
    answer = [*HELLO, {"role": "assistant", "content": "I am"}]
    assert prompt(answer, continue_final_message=True).text.endswith("assistant> I am")
    assert prompt(chat_template="{{ messages[0].content }}{{ mood }}", chat_template_kwargs={"mood": "!"}).text == "Hello!"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>{}</tool_call>", "hermes"), ("<tool_call><function=x><parameter=y>", "qwen_coder"),
        ("<tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n</tool_call>", "glm"),
        ("<seed:tool_call><function=x><parameter=y>", "seed_oss"), ("<function=x>{json}</function>", None),
        ("<tool_calls><tool_call>x\n```json", None), ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS]x[ARGS]", "mistral_args"), ("<|python_tag|>", "llama3"), ('"parameters": dictionary of', "llama3"),
        ("[func_name1(params)]", "pythonic"), ("nothing", None),
        ("'<｜tool▁sep｜>' + name + '```json'", "deepseek_v3"), ("'<｜tool▁sep｜>' + arguments", "deepseek"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"), ("<minimax:tool_call><invoke name=", "minimax"),
    ],
)  # fmt: skip
def test_a_template_shows_its_format(template: str, name: str | None) -> None:
    found = format_of(template, "auto", [])
    assert (None if found is None else found.name) == name


def test_templates_that_join_arguments_to_texts_are_given_texts() -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": {"at": "Zürich"}}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    joins = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name + ':' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert prompt(messages, joins).text == 'now:{"at": "Zürich"}'
    assert "{'at'" in prompt(messages, joins.replace("c.function.arguments", "c.function.arguments | string")).text


def test_reasoning_that_the_template_opens_and_that_it_closes() -> None:
    opens, closes = TEMPLATE + "<think>\n{# </think> #}", TEMPLATE + "<think>\n\n</think>\n\n"
    assert prompt(template=opens).form.starts_inside and not prompt(template=closes).form.starts_inside
    assert not prompt(template=opens, guide=("regex", "a")).form.starts_inside  # what is guided is the answer
    assert not prompt([{"role": "user", "content": "What is <think>?"}], template=closes).form.starts_inside
    half = [*HELLO, {"role": "assistant", "content": "<think>so far"}]
    assert prompt(half, template=closes + "{{ messages[-1].content }}", continue_final_message=True).form.starts_inside
    assert prompt(template=opens, reasoning_parser="none").form.tags is None


CALL_MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"), "mistral": ("[TOOL_CALLS]",), "mistral_args": ("[TOOL_CALLS]", "[ARGS]"), "llama3": (),
    "deepseek": DeepSeekFormat.marks, "deepseek_v3": DeepSeekFormat.marks, "kimi_k2": KimiFormat.marks,
}  # fmt: skip


ROME = '{"city": "Rome"}'


def section(format: type[SectionFormat], call: str, between: str = "") -> str:
    """The call, twice."""
    (begin, end), (opening, closing) = format.section, format.each
    return begin + between.join([opening + call + closing] * 2) + end


@pytest.mark.parametrize("kind", ["text", "added", "special"])
@pytest.mark.parametrize("name", FORMATS)
def test_an_enforced_call_is_one_that_the_format_reads(name: str, kind: str) -> None:
    """The grammar accepts a call as the format writes it, whether its marks are tokens or not, and what it accepts is read as that call."""
    marks = (*CALL_MARKS.get(name, ()), "<think>", "</think>") if kind != "text" else ()
    others = ("\n", "｜", "▁")  # that the tokenizer has no letters for
    tokenizer = tokenizer_with(
        SHOWS_TOOLS + "</think>", *(marks if kind == "special" else ()), added=(*others, *(marks if kind == "added" else ()))
    )  # fmt: skip
    request = ChatRequest(HELLO, [WEATHER, NOW], "required", tool_parser=name)
    form = request.prompt(tokenizer).form
    assert form.format is not None
    body = '{"name": "weather", "arguments": {"city": "Rome"}}'
    text = {
        "hermes": f"<tool_call>{body}</tool_call><tool_call>{body}</tool_call>", "mistral": f"[TOOL_CALLS][{body}, {body}]",
        "mistral_args": '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
        "llama3": '{"name": "weather", "parameters": {"city": "Rome"}};{"name": "weather", "parameters": {"city": "Rome"}}',
        "deepseek": section(DeepSeekFormat, f"weather{SEPARATOR}{ROME}"),
        "deepseek_v3": section(FencedDeepSeekFormat, f"function{SEPARATOR}weather\n```json\n{ROME}\n```", "\n"),
        "kimi_k2": section(KimiFormat, f"functions.weather:3<|tool_call_argument_begin|>{ROME}"),
    }.get(name, f"[{body},{body}]")  # fmt: skip
    text = f"<think>Let me see.</think> {text}"
    guides = Guides(tokenizer, len(tokenizer), frozenset())
    try:
        guide = guides.guide(form.enforced(SamplingParams()))
    finally:
        guides.close()
    assert guide is not None
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert guide.matcher.validate_tokens(ids) == len(ids)
    message = form.read(MarkedDecoder(tokenizer, form.kept).decode(ids, skip_special_tokens=True))
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("weather", '{"city": "Rome"}')] * 2
    assert message.reasoning_content == "Let me see." and message.content is None


def test_a_guided_answer_beside_tools_is_json_or_calls() -> None:
    tokenizer = tokenizer_with(SHOWS_TOOLS + "{# <tool_call> #}")
    schema = ("json_schema", '{"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": false}')
    form = ChatRequest(HELLO, [WEATHER]).prompt(tokenizer, schema).form
    guides = Guides(tokenizer, len(tokenizer), frozenset())
    try:
        for text in ('{"x": 1}', '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'):
            guide = guides.guide(form.enforced(SamplingParams(json_schema=schema[1])))
            ids = tokenizer(text).input_ids
            assert guide is not None and guide.matcher.validate_tokens(ids) == len(ids)
    finally:
        guides.close()


RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call:(?P<name>\w+)>", "close": "</call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<end>", "content": "text"},
    },
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("<think>hm</think>\n Yes<end>", "hm", "Yes", []),
        ('<think>hm</think>So <call:weather>{"city": "Rome"}</call><call:now>{}</call>', "hm", "So",
         [("weather", '{"city": "Rome"}'), ("now", "{}")]),
        ("So <call:now>{bad}</call> and on", None, "So <call:now>{bad}</call> and on", []),
        ('<call:now>{"half": ', None, '<call:now>{"half": ', []),
        ("<call:now>[1]</call>", None, "<call:now>[1]</call>", []),
    ],
)  # fmt: skip
def test_the_tokenizers_own_response_template_reads_answers(
    text: str, reasoning: str | None, content: str | None, calls: list[Any], size: int
) -> None:
    own = tokenizer_with(SHOWS_TOOLS)
    own.response_template = RESPONSE
    form = ChatRequest(HELLO, [WEATHER, NOW]).prompt(own).form
    reader = form.reader()
    parts = [part for i in range(0, len(text), size) for part in reader.feed(text[i : i + size])]
    message = ChatMessage.of(parts + reader.finish())
    assert (message.reasoning_content, [(call.name, call.arguments) for call in message.tool_calls]) == (reasoning, calls)
    assert message.content == content


@pytest.mark.parametrize(
    "text",
    [
        "<call:now>{}</call>So <call:now>{bad}</call> x", "a<call:now>{}</call><call:now>[1]</call> b",
        "<think>hm</think><call:now>{bad}</call>",
        "<call:now>{}</call> " + "so it is " * 20 + "<call:now>{bad</call>", "<call:now>{}</call><call:now>{}",
    ],
)  # fmt: skip
def test_what_cannot_be_read_loses_nothing_of_what_was_however_the_text_is_cut(text: str) -> None:
    own = tokenizer_with(SHOWS_TOOLS)
    own.response_template = RESPONSE
    form = ChatRequest(HELLO, [WEATHER, NOW]).prompt(own).form
    found = []
    for size in (1, 3, 7, 1000):
        reader = form.reader()
        parts = [part for i in range(0, len(text), size) for part in reader.feed(text[i : i + size])]
        message = ChatMessage.of(parts + reader.finish())
        found.append((message.reasoning_content, message.content, [(call.name, call.arguments) for call in message.tool_calls]))
    assert found == [found[0]] * 4
    reasoning, content, calls = found[0]
    assert content == (
        text.removeprefix("<think>hm</think>").replace("<call:now>{}</call>", "").removesuffix("<call:now>{}").strip() or None
    )
    assert (reasoning, calls[:1]) in ((None, [("now", "{}")]), ("hm", []))


def test_an_answer_by_schema_is_content_or_calls_also_with_a_response_template() -> None:
    """It begins after the thought that the prompt may end in, which the response template reads on from."""
    own = tokenizer_with(SHOWS_TOOLS + "<think>")
    own.response_template = RESPONSE
    schema = ("json_schema", '{"type": "object"}')
    form = ChatRequest(HELLO).prompt(own, schema).form
    assert (message := form.read('{"x": 1}')).content == '{"x": 1}' and message.reasoning_content is None
    beside = ChatRequest(HELLO, [WEATHER]).prompt(own, schema).form
    assert beside.grammar is not None
    calls = beside.read('[{"name": "weather", "arguments": {"city": "Rome"}}]').tool_calls
    assert [(call.name, call.arguments) for call in calls] == [("weather", '{"city": "Rome"}')]
    assert ChatRequest(HELLO, [WEATHER]).prompt(own, ("regex", "a")).form.template_of is own


def test_with_a_response_template_too_many_calls_and_names_that_utf8_cannot_carry_are_content() -> None:
    own = tokenizer_with(SHOWS_TOOLS)
    listed = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"}
    shape = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
    own.response_template = {**RESPONSE, "fields": {**RESPONSE["fields"], "tool_calls": {**listed, "transform": shape}}}
    request = ChatRequest(HELLO, [WEATHER, NOW], parallel_tool_calls=False)
    text = '<call>{"name": "now", "arguments": {}}</call>'
    message = request.prompt(own).form.read(text * 2)
    assert [call.name for call in message.tool_calls] == ["now"] and '{"name": "now"' in (message.content or "")
    broken = request.prompt(own).form.read(text.replace("now", "\\ud83d"))
    assert not broken.tool_calls and (broken.content or "").encode()


def test_reasoning_may_have_its_newer_name() -> None:
    for names in (("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")):
        (message,) = plain_messages([{"role": "assistant", "content": "a", **dict.fromkeys(names, "hm")}])
        assert message == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def test_the_effort_of_reasoning_is_a_variable_of_templates_that_read_it() -> None:
    reads = "{{ messages[0].content }}{{ reasoning_effort }}"
    assert prompt(chat_template=reads, reasoning_effort="low").text == "Hellolow"
    assert prompt(chat_template=reads, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}).text == "Hellohigh"
    with pytest.raises(ChatError, match="reasoning_effort: got 'low', and the model's chat template does not read it") as refused:
        prompt(reasoning_effort="low")
    assert refused.value.param == "reasoning_effort"


def test_developer_is_system_for_templates_that_do_not_know_it() -> None:
    asked = [{"role": "developer", "content": "Be brief."}, *HELLO]
    by_role = "{% for m in messages %}{{ m.role }}>{{ m.content }};{% endfor %}"
    assert prompt(asked, chat_template=by_role).text == "system>Be brief.;user>Hello;"
    assert prompt(asked, chat_template=by_role + "{# developer #}").text == "developer>Be brief.;user>Hello;"


def test_a_template_from_a_file_and_from_text(tmp_path: Any) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    assert read_template(str(tmp_path / "t.jinja")) == read_template("{{ messages[0].content }}")
    with pytest.raises(ValueError, match=r"cannot be read.*give a file, or a Jinja template"):
        read_template(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="Jinja cannot read it"):
        read_template("{% if %}")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(tokenizer=tokenizer_with(SHOWS_TOOLS + "{# <tool_call> </think> #}"))


def test_several_conversations_have_their_own_params_and_errors_say_which(llm: LLM) -> None:
    chats = [HELLO, [{"role": "user", "content": "Hi"}]]
    first, second = llm.chat(chats, [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)])
    assert (len(first.token_ids), len(second.token_ids)) == (2, 3)
    assert first.token_ids == llm.chat(HELLO, SamplingParams(max_tokens=2))[0].token_ids
    with pytest.raises(ChatError) as raised:
        llm.chat([HELLO, [{"role": "user"}]])
    assert raised.value.__notes__ == ["(conversation 2 of 2)"]
    for bad in ("Hello", [], [HELLO, []], [HELLO, HELLO[0]]):
        with pytest.raises(ChatError, match="messages"):
            llm.chat(bad)


def test_special_tokens_that_mark_calls_stay_in_the_text_and_others_do_not() -> None:
    own = tokenizer_with(SHOWS_TOOLS + "{# [TOOL_CALLS] [ARGS] #}", "[TOOL_CALLS]", "[ARGS]", "[OTHER]")
    other = make_llm(build("qwen3", vocab_size=len(own)), own)
    opening, args, rest = (own.convert_tokens_to_ids(text) for text in ("[TOOL_CALLS]", "[ARGS]", "[OTHER]"))
    params = SamplingParams(grammar=f'start: <[{rest}]> "So " <[{opening}]> "now" <[{args}]> "{{}}"')
    (completion,) = other.chat(HELLO, params, tools=[NOW])
    assert completion.text == "So [TOOL_CALLS]now[ARGS]{}" and completion.finish_reason == "tool_calls"
    assert (completion.message.content, completion.message.tool_calls[0].name) == ("So", "now")
    parts = [event.part for event in other.stream_chat(HELLO, sampling_params=params, tools=[NOW]) if event.part is not None]
    streamed = ChatMessage.of(parts)
    assert (streamed.content, [call.name for call in streamed.tool_calls]) == ("So", ["now"])
    assert other.generate([[5]], params)[0].text == "So now{}"


def test_closing_a_streamed_chat_cancels_it(llm: LLM) -> None:
    events = llm.stream_chat(HELLO, SamplingParams(max_tokens=100))
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert not llm.engine.requests and not llm._inboxes


def test_a_chat_without_a_template_says_what_to_do() -> None:
    own = tokenizer_with(TEMPLATE)
    own.chat_template = None
    with pytest.raises(ChatError, match=r"no chat template.*chat_template="):
        make_llm(tokenizer=own).chat(HELLO)
    with pytest.raises(ChatError, match=r"no tokenizer.*LLM\(model, tokenizer=...\)"):
        make_llm().chat(HELLO)
