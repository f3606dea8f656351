"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from paged_attn.chat.request import ChatRequest
from paged_attn.server.api.bodies import IGNORED, NEUTRAL, NOTHING, Body
from paged_attn.server.api.fields.bounds import Closed, Effort, Messages, Name, Schema, Settings, Stop, Tools
from paged_attn.server.api.messages.conversation import length_of_blocks, messages_of
from paged_attn.server.http.errors import NO_THREADS, ApiError, bad_field, not_allowed

LEFT_OUT = ("cache_control", "eager_input_streaming", "defer_loading", "allowed_callers", "type")  # fields of a tool that change no answer
IGNORED_HERE = IGNORED | {"cache_control"}  # prefixes are cached, whatever it says
# Edits of a conversation that leave all of it; Claude Code sends the last ones with every request.
KEEPS_ALL = ({"edits": []}, *({"edits": [{"type": "clear_thinking_20251015", "keep": keep}]} for keep in ({"type": "all"}, "all")))
# Fields that would change an answer, and fields of the other routes: only the values that ask for nothing.
NOT_HERE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "container": (NOTHING, "this server runs no code; leave it out"),
    "mcp_servers": (NOTHING, "this server calls no others; give tools, which the client runs"),
    "context_management": ((*NOTHING, *KEEPS_ALL), "nothing is left out of a conversation; send less of it"),
    "thread": ((None,), "this server holds no conversations; send the whole of it, whose prefix is cached"),
    "compaction": ((None,), "this server summarizes no conversations; ask for a summary in a message"),
    "speed": ((None, "standard"), "there is one speed; leave it out"),
    "n": ((None, 1), "this route gives one answer; leave it out"),
    "return_token_ids": ((None, False), "only completions and chats have it"),
    "return_tokens_as_token_ids": ((None, False), "only completions and chats have it"),
    "stream_options": ((None,), "streams of this route have the usage; leave it out"),
}
MODES = {"auto": "auto", "any": "required", "none": "none"}


class OutputFormat(Closed):
    model_config = ConfigDict(populate_by_name=True)
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputSettings(Closed):
    format: OutputFormat | None = Field(None, description="the answer is JSON of this schema")
    effort: Effort | None = Field(None, description="the variable reasoning_effort of the chat template; most do not read it")


class Thinking(Closed):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="is not enforced")
    display: Literal["summarized"] | None = Field(None, description="thinking comes as it is")


class ToolChoice(Closed):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Conversation(Closed):
    """What both routes share: all that a prompt is made of."""

    ignored = IGNORED_HERE
    prompt_name: ClassVar[str] = "messages"

    model: Name | None = Field(None, description="the served model's name, or none")
    messages: Messages = Field(description="of role user and assistant; contents are texts, or blocks")
    system: Any = Field(
        None,
        description="a text, or blocks of text",
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]},
    )
    tools: Tools | None = Field(None, description="functions that the model may call: name, description, input_schema")
    tool_choice: ToolChoice | None = Field(None, description='default where there are tools: {"type": "auto"}')
    thinking: Thinking | None = Field(None, description="for chat templates that read enable_thinking or thinking")
    output_config: OutputSettings | None = None
    chat_template_kwargs: Settings | None = Field(None, description="extension: variables for the model's chat template")

    @property
    def num_characters(self) -> int:
        """About how many there are to tokenize."""
        return length_of_blocks(self.messages, self.system)

    def chat_request(self, tool_parser: str, reasoning_parser: str) -> ChatRequest:
        """As of `ChatBody`; called beside the event loop, for it reads all blocks. A last message of the assistant is gone on with."""
        messages, choice = messages_of(self.messages, self.system), self.tool_choice
        goes_on = messages[-1]["role"] == "assistant"
        if goes_on and "tool_calls" in messages[-1]:
            where = f"messages.{len(self.messages) - 1}"
            raise bad_field(where, "the last message calls a tool; send its result after it, as a block tool_result")
        given = {} if self.thinking is None else dict.fromkeys(("enable_thinking", "thinking"), self.thinking.type != "disabled")
        effort = None if self.output_config is None else self.output_config.effort
        variables = given if effort is None else {**given, "reasoning_effort": effort}
        return ChatRequest(
            messages, [_tool(tool, f"tools.{i}") for i, tool in enumerate(self.tools or ())] or None, _choice(choice),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use, continue_final_message=goes_on,
            chat_template_kwargs={**variables, **(self.chat_template_kwargs or {})}, tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )  # fmt: skip


class CountBody(Conversation):
    """The body of POST /v1/messages/count_tokens."""


class MessagesBody(Conversation, Body):
    """The body of POST /v1/messages."""

    not_here = NOT_HERE
    ignored = IGNORED_HERE | set(NEUTRAL) | set(NOT_HERE)
    codes = {"thread": NO_THREADS}
    format_name: ClassVar[str] = "output_config.format"

    max_tokens: int = Field(json_schema_extra={"minimum": 0})
    stop_sequences: Stop | None = None

    def schema_of_format(self) -> dict[str, Any] | None:
        return None if self.output_config is None or self.output_config.format is None else self.output_config.format.schema_

    def _stops(self) -> tuple[str, ...] | None:
        given = self.stop_sequences
        own = (given,) if isinstance(given, str) else tuple(given or ())
        return (*own, *(super()._stops() or ())) or None


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """In the form that chats have."""
    if tool.get("type") not in (None, "custom"):
        raise not_allowed(f"{where}.type", tool["type"], "'custom', a tool that the client runs")
    function = {name: value for name, value in tool.items() if name not in LEFT_OUT and value is not None}
    if "input_schema" in function:
        function["parameters"] = function.pop("input_schema")
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type != "tool":
        return MODES[choice.type]
    if choice.name is None:
        raise ApiError(400, 'tool_choice: type "tool" without a name; give the name of a tool', param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}
