"""The body of POST /v1/responses: a conversation as items, and the form of the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from paged_attn.asynchronous.texts import length_of
from paged_attn.chat.request import ChatRequest
from paged_attn.chat.tools import CHOICES
from paged_attn.server.api.bodies import IGNORED, NEUTRAL, NOTHING, Body
from paged_attn.server.api.bounds import Choice, Closed, Effort, Name, Schema, Settings, Tools, within
from paged_attn.server.api.responses.input_items import messages_of
from paged_attn.server.http.errors import ApiError
from paged_attn.shown import shown

STATELESS = "this server stores no answers; send the whole conversation as input"
# Of all that a body may have, what would change an answer here, and is not supported.
OWN_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((None,), STATELESS),
    "conversation": ((None,), STATELESS),
    "background": ((None, False), STATELESS),
    "prompt": ((None,), "this server stores no prompts; give input and instructions"),
    "truncation": ((None, "disabled"), "nothing is left out of a conversation; send less of it"),
    "max_tool_calls": ((None,), "leave it out"),
    "top_logprobs": ((None, 0), "only chats and completions have log-probabilities"),
    "include": ((*NOTHING, ["reasoning.encrypted_content"]), "reasoning comes as text, and nothing else is left out of answers"),
}
# Fields of the other routes.
NOT_HERE: Mapping[str, tuple[Any, ...]] = {"max_tokens": (None,), "n": (None, 1), "return_token_ids": (None, False)}


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
    effort: Effort | None = Field(None, description="for models whose chat template reads it, as gpt-oss's does")
    summary: Literal["auto"] | None = Field(None, description="reasoning comes as text, whatever it says")


class ResponsesBody(Body):
    """The body of POST /v1/responses."""

    neutral = {name: each for name, each in {**NEUTRAL, **OWN_NEUTRAL}.items() if name != "store"}
    ignored = IGNORED | set(NEUTRAL) | set(OWN_NEUTRAL) | {"prompt_cache_retention"}
    limit_name, prompt_name = "max_output_tokens", "input"
    text_at_end: ClassVar[bool] = False  # the tokens of reasoning are counted as they come

    input: Any = Field(
        description="a text, or a list of messages, calls, their results and reasoning",
        json_schema_extra={"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]},
    )
    instructions: str | None = Field(None, description="a system message before the others")
    max_output_tokens: int | None = Field(None, description="default: what there is room for", json_schema_extra=within(0))
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    tools: Tools | None = Field(None, description="functions that the model may call")
    tool_choice: Choice = Field(
        None, json_schema_extra={"anyOf": [{"enum": [None, *CHOICES]}, {"type": "object"}]},
        description='"none", "auto" (default where there are tools), "required", {"type": "function", "name": ...}',
    )  # fmt: skip
    parallel_tool_calls: bool | None = Field(None, description="whether one answer may hold several calls; default true")
    metadata: Settings | None = Field(None, description="comes back with the answer")
    store: bool | None = Field(None, description="nothing is stored, whatever it says")
    chat_template_kwargs: Settings | None = Field(None, description="extension: variables for the model's chat template")

    def num_logprobs(self) -> int | None:
        return None

    def max_new_tokens(self, room: int) -> int:
        return room if self.max_output_tokens is None else self.max_output_tokens

    @property
    def num_answers(self) -> int:
        """One; raises ApiError: 400 for a field of other routes."""
        for name, allowed in NOT_HERE.items():
            if (value := getattr(self, name)) not in allowed:
                hint = "give max_output_tokens" if name == "max_tokens" else "leave it out"
                raise ApiError(400, f"{name}={shown(value)} is not supported by this route; {hint}", param=name, code="unsupported_value")
        return 1

    def wanted_schema(self) -> dict[str, Any] | None:
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.type == "text":
            return self.json_schema
        if self.json_schema is not None:
            raise ApiError(400, "json_schema: got one beside text.format; give one of them", param="json_schema")
        if (wanted.type == "json_schema") != (wanted.schema_ is not None):
            raise ApiError(400, 'text.format: schema belongs to type "json_schema", and to it alone', param="text.format")
        return {"type": "object"} if wanted.schema_ is None else wanted.schema_

    @property
    def num_characters(self) -> int:
        """About how many there are to tokenize."""
        items = length_of(self.input) if isinstance(self.input, list) else len(self.input) if isinstance(self.input, str) else 0
        return items + len(self.instructions or "")

    def chat_request(self, tool_parser: str, reasoning_parser: str) -> ChatRequest:
        """As of `ChatBody`; to be called beside the event loop, for it reads all items."""
        self._check_what_comes_back()
        return ChatRequest(
            messages_of(self.input, self.instructions), [_tool(tool, i) for i, tool in enumerate(self.tools or ())] or None,
            _choice(self.tool_choice), parallel_tool_calls=self.parallel_tool_calls is not False,
            chat_template_kwargs=self.chat_template_kwargs or {}, tool_parser=tool_parser, reasoning_parser=reasoning_parser,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        )  # fmt: skip

    def _check_what_comes_back(self) -> None:
        """It is written into the answer as it was sent: raises ApiError, 400, for what no JSON in UTF-8 can hold."""
        for name in ("instructions", "metadata", "tools", "tool_choice", "text"):
            value = getattr(self, name)
            try:
                json.dumps(value.model_dump() if isinstance(value, TextSettings) else value, ensure_ascii=False, allow_nan=False).encode()
            except ValueError as error:
                allowed = "texts of whole characters, and finite numbers"
                raise ApiError(400, f"{name}: holds what no JSON can: {error}; allowed: {allowed}", param=name) from error


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    """In the form that chats have."""
    if tool.get("type") != "function":
        where = f"tools.{index}.type"
        raise ApiError(400, f"{where}: got {shown(tool.get('type'))}; allowed: 'function', which the client runs itself", param=where)
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type" and value is not None}}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
