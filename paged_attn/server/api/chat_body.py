"""The body of POST /v1/chat/completions: messages, and the form of the answer."""

from __future__ import annotations

from pydantic import Field

from paged_attn.asynchronous.texts import length_of
from paged_attn.chat.request import ChatRequest
from paged_attn.chat.tools import CHOICES
from paged_attn.server.api.bodies import MAX_LOGPROBS, FormattedBody
from paged_attn.server.api.fields.bounds import Choice, Effort, Messages, Settings, Tools, bounded
from paged_attn.server.http.errors import ApiError, bad_field
from paged_attn.shown import shown


class ChatBody(FormattedBody):
    """The body of POST /v1/chat/completions."""

    logprobs_name, prompt_name = "top_logprobs", "messages"
    messages: Messages
    max_completion_tokens: int | None = bounded(0, description="the newer name of max_tokens; default: what there is room for")
    logprobs: bool | None = None
    top_logprobs: int | None = bounded(0, MAX_LOGPROBS, "needs logprobs=true")
    tools: Tools | None = Field(None, description="functions that the model may call")
    tool_choice: Choice = Field(
        None,
        json_schema_extra={"anyOf": [{"enum": [None, *CHOICES]}, {"type": "object"}]},
        description='"none", "auto" (default where there are tools), "required", {"type": "function", "function": {"name": ...}}',
    )
    parallel_tool_calls: bool | None = Field(None, description="whether one answer may hold several calls; default true")
    reasoning_effort: Effort | None = Field(None, description="for models whose chat template reads it, as gpt-oss's does")
    add_generation_prompt: bool | None = Field(None, description="extension: end the prompt with the beginning of an answer; default true")
    continue_final_message: bool | None = Field(None, description="extension: go on with the last message")
    chat_template_kwargs: Settings | None = Field(None, description="extension: variables for the model's chat template")

    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "allowed only with logprobs=true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def max_new_tokens(self, room: int) -> int:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            what = f"max_tokens is {shown(self.max_tokens)} and max_completion_tokens is {shown(self.max_completion_tokens)}"
            raise ApiError(400, f"{what}; give one of them", param="max_completion_tokens")
        return both.pop() if both else room  # type: ignore[return-value]

    @property
    def num_characters(self) -> int:
        """About how many there are to tokenize."""
        return length_of(self.messages)

    def chat_request(self, tool_parser: str, reasoning_parser: str) -> ChatRequest:
        """What the engine's side makes a prompt of. `tool_parser`, `reasoning_parser`: the server's. Raises ApiError: 400 for settings that
        contradict each other."""
        refuse_two_ends(self.add_generation_prompt, self.continue_final_message)
        return ChatRequest(
            self.messages, self.tools, self.tool_choice, parallel_tool_calls=self.parallel_tool_calls is not False,
            chat_template_kwargs=self.chat_template_kwargs or {}, add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message), tool_parser=tool_parser, reasoning_parser=reasoning_parser,
            reasoning_effort=self.reasoning_effort,
        )  # fmt: skip


def refuse_two_ends(add_generation_prompt: bool | None, continue_final_message: bool | None) -> None:
    """Raises ApiError: 400 for a chat whose prompt should end both with the beginning of an answer and with its last message."""
    if continue_final_message and add_generation_prompt:
        what = "got true beside continue_final_message=true, which goes on with the last message; give one of them"
        raise bad_field("add_generation_prompt", what)
