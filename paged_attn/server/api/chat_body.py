"""The body of POST /v1/chat/completions: messages, and the form of the answer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from paged_attn.server.api.bodies import MAX_LOGPROBS, Body
from paged_attn.server.api.bounds import MAX_NAME, MAX_PARTS, Closed, Messages, Name, Schema, Settings, too_many, within
from paged_attn.server.http.errors import ApiError
from paged_attn.shown import shown


class JsonSchemaFormat(Closed):
    model_config = ConfigDict(populate_by_name=True)
    name: Name | None = None
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = Field(None, description="answers always follow the schema")


class ResponseFormat(Closed):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatBody(Body):
    """The body of POST /v1/chat/completions."""

    logprobs_name = "top_logprobs"
    messages: Messages
    max_completion_tokens: int | None = Field(
        None, description="the newer name of max_tokens; default: what there is room for", json_schema_extra=within(0)
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="needs logprobs=true", json_schema_extra=within(0, MAX_LOGPROBS))
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Settings | None = Field(None, description="extension: variables for the model's chat template")

    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: allowed only with logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def max_new_tokens(self, room: int) -> int:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            what = f"max_tokens is {shown(self.max_tokens)} and max_completion_tokens is {shown(self.max_completion_tokens)}"
            raise ApiError(400, f"{what}; give one of them", param="max_completion_tokens")
        return both.pop() if both else room  # type: ignore[return-value]

    def wanted_schema(self) -> dict[str, Any] | None:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return self.json_schema
        if self.json_schema is not None:
            raise ApiError(400, "json_schema: got one beside response_format; give one of them", param="json_schema")
        if (wanted.type == "json_schema") != (wanted.json_schema is not None):
            raise ApiError(400, 'response_format: json_schema belongs to type "json_schema", and to it alone', param="response_format")
        return {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema_

    def plain_messages(self) -> list[dict[str, Any]]:
        """Messages of role, content (text) and name, as templates expect them.

        Raises:
            ApiError: 400 for what is no text.
        """
        return [_plain_message(message, f"messages.{i}") for i, message in enumerate(self.messages)]


def _plain_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    # What a client got as an answer and sends back holds many empty fields.
    fields = ("role", "content", "name")
    rest = next((name for name, value in message.items() if name not in fields and value not in (None, [], {})), None)
    if rest is not None:
        what = f"field {shown(rest)} is not supported; allowed are role, content and name"
        raise ApiError(400, f"{where}: {what}", param=f"{where}.{rest}")
    role, name = message.get("role"), message.get("name")
    if not isinstance(role, str) or len(role) > MAX_NAME:
        raise ApiError(400, f"{where}.role: got {shown(role)}; allowed: a text such as 'user'", param=f"{where}.role")
    if name is not None and (not isinstance(name, str) or len(name) > MAX_NAME):
        allowed = f"a text of at most {MAX_NAME} characters"
        raise ApiError(400, f"{where}.name: got {shown(name)}; allowed: {allowed}", param=f"{where}.name")
    content = _content(message.get("content"), f"{where}.content")
    return {"role": role, "content": content, **({} if name is None else {"name": name})}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ApiError(400, f"{where}: got {shown(content)}; allowed: a text, or a list of text parts", param=where)
    if len(content) > MAX_PARTS:
        raise too_many(where, len(content), MAX_PARTS, "parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ApiError(400, f"{where}: a part is {shown(kind)}; allowed: parts of type 'text', with a text", param=where)
    return "".join(part["text"] for part in content)
