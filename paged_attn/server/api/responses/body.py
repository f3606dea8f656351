"""The body of POST /v1/responses: a conversation as items, and the form of the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from paged_attn.asynchronous.texts import length_of
from paged_attn.chat.messages import MAX_CALLS, text_of
from paged_attn.chat.request import ChatRequest
from paged_attn.chat.tools import CHOICES
from paged_attn.server.api.bodies import IGNORED, NEUTRAL, NOTHING, Body
from paged_attn.server.api.fields.bounds import MAX_MESSAGES, Choice, Closed, Effort, Name, Schema, Settings, Tools, bounded, too_many
from paged_attn.server.api.responses.tools import chat_tools, whole_name
from paged_attn.server.http.errors import bad_field, not_allowed
from paged_attn.shown import shown

STATELESS = "this server stores no answers; send the whole conversation as input"
# Fields that would change an answer, and fields of the other routes: only the values that ask for nothing.
NOT_HERE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((None,), STATELESS),
    "conversation": ((None,), STATELESS),
    "background": ((None, False), STATELESS),
    "prompt": ((None,), "this server stores no prompts; give input and instructions"),
    "truncation": ((None, "disabled"), "nothing is left out of a conversation; send less of it"),
    "max_tool_calls": ((None,), "leave it out"),
    "top_logprobs": ((None, 0), "only chats and completions have log-probabilities"),
    "include": ((*NOTHING, ["reasoning.encrypted_content"]), "reasoning comes as text, and nothing else is left out of answers"),
    "max_tokens": ((None,), "give max_output_tokens"),
    "n": ((None, 1), "this route gives one answer; leave it out"),
    "return_token_ids": ((None, False), "only completions and chats have it"),
    "return_tokens_as_token_ids": ((None, False), "only completions and chats have it"),
}
# What an item of each type may have beside its type, its id and its status.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments", "namespace"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("summary", "content"),
}
# What our answers, or OpenAI's client, put beside them; it changes nothing.
BESIDE = ("type", "id", "status", "encrypted_content", "phase", "parsed_arguments")
ROLES = {"developer": "system"}  # the newer name of a role; templates know only the older one
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class TextFormat(Closed):
    model_config = ConfigDict(populate_by_name=True)
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="answers always follow the schema")


class TextSettings(Closed):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningSettings(Closed):
    effort: Effort | None = Field(None, description="a variable of the chat template; most do not read it")
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="reasoning comes as text, whatever it says")


class ResponsesBody(Body):
    """The body of POST /v1/responses."""

    not_here = NOT_HERE
    ignored = IGNORED | {"client_metadata"} | set(NEUTRAL) | set(NOT_HERE)
    limit_name, prompt_name, format_name = "max_output_tokens", "input", "text.format"
    text_at_end: ClassVar[bool] = False  # the tokens of reasoning are counted as they come

    input: Any = Field(
        description="a text, or a list of messages, calls, their results and reasoning",
        json_schema_extra={"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]},
    )
    instructions: str | None = Field(None, description="a system message before the others")
    max_output_tokens: int | None = bounded(0, description="default: what there is room for")
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    tools: Tools | None = Field(None, description="functions that the model may call, and namespaces of functions")
    tool_choice: Choice = Field(
        None, json_schema_extra={"anyOf": [{"enum": [None, *CHOICES]}, {"type": "object"}]},
        description='"none", "auto" (default where there are tools), "required", {"type": "function", "name": ...}',
    )  # fmt: skip
    parallel_tool_calls: bool | None = Field(None, description="whether one answer may hold several calls; default true")
    metadata: Settings | None = Field(None, description="comes back with the answer")
    store: bool | None = Field(None, description="nothing is stored, whatever it says")
    chat_template_kwargs: Settings | None = Field(None, description="extension: variables for the model's chat template")

    @property
    def includes_usage(self) -> bool:
        """The last event of a stream has it, whatever is asked; raises ApiError: 400 for a usage in every event."""
        if self.repeats_usage:
            what = "continuous_usage_stats=true is not supported by this route, whose last event has the usage; leave it out"
            raise bad_field("stream_options", what)
        return super().includes_usage

    def max_new_tokens(self, room: int) -> int:
        return room if self.max_output_tokens is None else self.max_output_tokens

    def schema_of_format(self) -> dict[str, Any] | None:
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.type == "text":
            return None
        if (wanted.type == "json_schema") != (wanted.schema_ is not None):
            raise bad_field("text.format", 'schema belongs to type "json_schema", and to it alone')
        return {"type": "object"} if wanted.schema_ is None else wanted.schema_

    @property
    def num_characters(self) -> int:
        """About how many there are to tokenize."""
        items = length_of(self.input) if isinstance(self.input, list) else len(self.input) if isinstance(self.input, str) else 0
        return items + len(self.instructions or "")

    def chat_request(self, tool_parser: str, reasoning_parser: str) -> ChatRequest:
        """As of `ChatBody`; to be called beside the event loop, for it reads all items."""
        self._check_what_comes_back()
        effort = {} if self.reasoning is None or self.reasoning.effort is None else {"reasoning_effort": self.reasoning.effort}
        return ChatRequest(
            messages_of(self.input, self.instructions), chat_tools(self.tools) or None, _choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False, chat_template_kwargs={**effort, **(self.chat_template_kwargs or {})},
            tool_parser=tool_parser, reasoning_parser=reasoning_parser,
        )  # fmt: skip

    def _check_what_comes_back(self) -> None:
        """Check what is written into the answer as it was sent: raises ApiError, 400, for what no JSON in UTF-8 can hold."""
        for name in ("instructions", "metadata", "tools", "tool_choice", "text"):
            value = getattr(self, name)
            try:
                json.dumps(value.model_dump() if isinstance(value, TextSettings) else value, ensure_ascii=False, allow_nan=False).encode()
            except ValueError as error:
                what = f"holds what no JSON can: {error}; allowed: texts of whole characters, and finite numbers"
                raise bad_field(name, what) from error


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def messages_of(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Messages for `ChatRequest`. Reasoning, text and calls that follow each other are one message of the assistant; system messages that
    do are one, too. Raises ApiError: 400 for anything that is neither text nor a list of known items; with its place."""
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise not_allowed("input", given, "a text, or a list of items")
    if len(given) > MAX_MESSAGES:
        raise too_many("input", len(given), MAX_MESSAGES, "items")
    for i, item in enumerate(given):
        _add(messages, _checked(item, f"input.{i}"), f"input.{i}")
    return messages


def _checked(item: Any, where: str) -> dict[str, Any]:
    kind = item.get("type") or "message" if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(kind, str) or kind not in FIELDS:
        got = shown(kind if isinstance(item, dict) else item)
        raise bad_field(where, f"got {got}; allowed: items of type {', '.join(FIELDS)}")
    known = (*FIELDS[kind], *BESIDE)
    if (other := next((name for name, value in item.items() if name not in known and value not in (None, [], {})), None)) is not None:
        raise bad_field(where, f"field {shown(other)} is not supported; allowed are {', '.join(FIELDS[kind])}")
    return {**item, "type": kind}


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item["type"]
    if kind == "message":
        role = item.get("role")
        role, content = ROLES.get(role, role) if isinstance(role, str) else role, _text(item.get("content"), f"{where}.content")
        last = messages[-1] if messages else {}
        if role == "system" and last.get("role") == "system":
            last["content"] = f"{last['content']}\n\n{content}"
        elif role == "assistant":
            _assistant(messages, unless=("content", "tool_calls"))["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        text = _text(item.get("content") or item.get("summary") or "", f"{where}.content")
        if text:
            _assistant(messages, unless=("content", "tool_calls", "reasoning_content"))["reasoning_content"] = text
    elif kind == "function_call":
        if not isinstance(namespace := item.get("namespace"), str | None):
            raise not_allowed(f"{where}.namespace", namespace, "a text")
        function = {"name": whole_name(namespace, item.get("name")), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        calls = _assistant(messages).setdefault("tool_calls", [])
        if len(calls) == MAX_CALLS:
            raise bad_field(where, f"more than {MAX_CALLS} calls follow each other; allowed: at most {MAX_CALLS}")
        calls.append(call)
    else:
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"), f"{where}.output")})


def _assistant(messages: list[dict[str, Any]], unless: tuple[str, ...] = ()) -> dict[str, Any]:
    """The assistant's message that goes on, or a new one, if the last has one of these already."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in unless):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: Any, where: str) -> str:
    return text_of(content, where, TEXTS, may_be_empty=True)
