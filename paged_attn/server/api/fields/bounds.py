"""Field types whose size is checked before anything is built from them, and models that reject the first unknown field."""

from __future__ import annotations

import difflib
from collections.abc import Set
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from paged_attn.chat.tools import MAX_TOOLS
from paged_attn.engine.setting_names import OTHER_PARAM, SAME_PARAM
from paged_attn.server.http.errors import ApiError, bad_field, unknown_field

MAX_NAME = 256  # characters of a model name, a role or any other name
MAX_SALT = 4096
MAX_STOPS, MAX_STOP = 64, 1024  # number of strings, and characters of each
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 1 << 18  # the size of the largest vocabularies
MAX_BIASES = 1024
MAX_BAD_WORDS, MAX_BAD_WORD = 64, 256  # number of texts, and characters of each
MAX_MESSAGES = 4096
MAX_SETTINGS, MAX_SETTINGS_TEXT = 1024, 64 << 10  # chat_template_kwargs: number of values, characters in all
MAX_SCHEMA_TEXT = 256 << 10
MAX_TOOLS_VALUES, MAX_TOOLS_TEXT = 16 << 10, 128 << 10  # values and characters of all tools together
# Fields that a body does not have, and the one of ours that means the same, or what to do.
SAME_FIELD = {**SAME_PARAM, "max_new_tokens": "max_tokens", "prompts": "prompt"}
OTHER_FIELD = {
    **OTHER_PARAM,
    "request_id": "send the header x-request-id",
    "guided_decoding_backend": "there is one: llguidance; leave it out",
    "chat_template": "the server has one: --chat-template; chat_template_kwargs are its variables",
    "enable_thinking": 'use chat_template_kwargs={"enable_thinking": ...}',
    "thinking": "use chat_template_kwargs, as the template calls it",
}
MAX_COMPARED = 64  # longest name that is compared with known ones


def bounded(low: float, high: float | None = None, description: str | None = None) -> Any:
    """An optional number, whose range the engine checks, in its own words; /openapi.json tells it."""
    return Field(None, description=description, json_schema_extra={"minimum": low} if high is None else {"minimum": low, "maximum": high})


def too_many(name: str, got: int, most: int, what: str) -> ApiError:
    return bad_field(name, f"got {got:,} {what}; allowed: at most {most:,}")


def at_most(most: int, what: str) -> BeforeValidator:
    def check(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, (str, list, dict)) and len(value) > most:
            raise too_many(str(info.field_name), len(value), most, "characters" if isinstance(value, str) else what)
        return value

    return BeforeValidator(check)


def texts_at_most(most: int, longest: int, what: str) -> BeforeValidator:
    """For a list of so many texts, each of so many characters; `what`: the word for one of them."""

    def check(value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if isinstance(value, list) and len(value) > most:
            raise too_many(name, len(value), most, f"{what}s")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and len(text) > longest:
                raise too_many(name, len(text), longest, f"characters in one {what}")
        return value

    return BeforeValidator(check)


def bounded_json(most_values: int, most_text: int) -> BeforeValidator:
    """For what is handed on as it is: values of any kind, counted until there are too many."""

    def check(value: Any, info: ValidationInfo) -> Any:
        name, left, values, text = str(info.field_name), [value], 0, 0
        while left:
            each = left.pop()
            values += 1
            text += len(each) if isinstance(each, str) else sum(map(len, each)) if isinstance(each, dict) else 0
            if values > most_values:
                raise too_many(name, values, most_values, "values or more")
            if text > most_text:
                raise too_many(name, text, most_text, "characters or more")
            if isinstance(each, (dict, list)):
                if len(each) > most_values:
                    raise too_many(name, len(each), most_values, "values or more")
                left.extend(each.values() if isinstance(each, dict) else each)
        return value

    return BeforeValidator(check)


def _text(most: int) -> tuple[BeforeValidator, Any]:
    """A limit that is told in the schema, too. Pydantic's own would refuse texts that no UTF-8 can hold, and not say why."""
    return at_most(most, ""), Field(json_schema_extra={"maxLength": most})


Name = Annotated[str, *_text(MAX_NAME)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # OpenAI's and Anthropic's; a template may know fewer
Salt = Annotated[str, *_text(MAX_SALT)]
GuideText = Annotated[str, *_text(MAX_SCHEMA_TEXT)]
_OneStop = Annotated[str, Field(json_schema_extra={"maxLength": MAX_STOP})]
Stop = Annotated[
    _OneStop | Annotated[list[_OneStop], Field(max_length=MAX_STOPS, fail_fast=True)], texts_at_most(MAX_STOPS, MAX_STOP, "string")
]
AllowedTokens = Annotated[list[int], Field(max_length=MAX_ALLOWED_TOKENS, fail_fast=True), at_most(MAX_ALLOWED_TOKENS, "ids")]
StopTokens = Annotated[list[int], Field(max_length=MAX_STOP_TOKENS, fail_fast=True), at_most(MAX_STOP_TOKENS, "ids")]
_OneWord = Annotated[str, Field(json_schema_extra={"maxLength": MAX_BAD_WORD})]
BadWords = Annotated[list[_OneWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True), texts_at_most(MAX_BAD_WORDS, MAX_BAD_WORD, "text")]
Biases = Annotated[dict[str, float], Field(max_length=MAX_BIASES), at_most(MAX_BIASES, "tokens")]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES, "messages")]
Tools = Annotated[
    list[dict[str, Any]], Field(max_length=MAX_TOOLS), at_most(MAX_TOOLS, "tools"), bounded_json(MAX_TOOLS_VALUES, MAX_TOOLS_TEXT)
]
Choice = Annotated[Any, bounded_json(16, 1024)]
Settings = Annotated[dict[str, Any], bounded_json(MAX_SETTINGS, MAX_SETTINGS_TEXT)]
Schema = Annotated[dict[str, Any], bounded_json(MAX_SCHEMA_TEXT // 2, MAX_SCHEMA_TEXT)]


class Closed(BaseModel):
    """Only the fields that it has, of exactly their types."""

    model_config = ConfigDict(extra="forbid", strict=True)
    ignored: ClassVar[Set[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _known_only(cls, values: Any) -> Any:
        """Before pydantic makes an error of each of them."""
        if not isinstance(values, dict):
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        allowed = known | cls.ignored
        if (unknown := next((name for name, value in values.items() if value is not None and name not in allowed), None)) is not None:
            raise unknown_field(unknown, _field_instead(unknown, known))
        return {name: value for name, value in values.items() if name in known}


def _field_instead(name: str, known: Set[str]) -> str:
    """ "" if nothing comes near."""
    if len(name) > MAX_COMPARED:
        return ""
    if (same := SAME_FIELD.get(name)) in known:
        return f"use {same}"
    if name in OTHER_FIELD:
        return OTHER_FIELD[name]
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""
