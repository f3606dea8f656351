"""Fields of OpenAI and vLLM that constrain an answer, translated to `SamplingParams`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from paged_attn.engine.sampling_params import MAX_GUIDE_BYTES
from paged_attn.server.api.fields.bounds import MAX_SCHEMA_TEXT, Closed, GuideText, Name, Schema, at_most, texts_at_most
from paged_attn.server.http.errors import bad_field
from paged_attn.shown import shown

MAX_CHOICES, MAX_CHOICE = 1024, 4096  # number of texts, and characters of each
OLDER = "guided_"  # prefix of the fields that older vLLM releases use for this
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True), texts_at_most(MAX_CHOICES, MAX_CHOICE, "text")]


class JsonSchemaFormat(Closed):
    model_config = ConfigDict(populate_by_name=True)
    name: Name | None = None
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = Field(None, description="answers always follow the schema")


class ResponseFormat(Closed):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def schema_of_answer(self) -> dict[str, Any] | None:
        """Raises ApiError: 400 for a schema without its type, and the other way round."""
        if self.type == "json_schema" and self.json_schema is None:
            raise bad_field("response_format", 'type is "json_schema", and its field json_schema is missing')
        if self.type != "json_schema" and self.json_schema is not None:
            raise bad_field("response_format", f'json_schema belongs to type "json_schema"; got type {shown(self.type)}')
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


class StructuredOutputs(Closed):
    """vLLM's: one of these."""

    model_config = ConfigDict(populate_by_name=True)
    ignored = frozenset({"disable_fallback"})  # from one of vLLM's backends to another
    json_: Schema | Annotated[str, at_most(MAX_SCHEMA_TEXT, "")] | None = Field(None, alias="json", description="a schema, or its text")
    regex: GuideText | None = None
    choice: Choices | None = Field(None, description="the answer is one of these texts")
    grammar: GuideText | None = Field(None, description="in llguidance's dialect of Lark, or GBNF")
    json_object: bool | None = Field(None, description="the answer is a JSON object")
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None

    def guide(self) -> dict[str, Any]:
        """The one keyword of `SamplingParams` that says the same. Raises ApiError: 400 for none of them, or for several."""
        given = {name.rstrip("_"): value for name in type(self).model_fields if (value := getattr(self, name)) not in (None, False)}
        if len(given) != 1:
            got = ", ".join(given) or "none of them"
            raise bad_field("structured_outputs", f"got {got}; allowed: one of json, regex, choice, grammar and json_object")
        ((name, value),) = given.items()
        if name == "json_object":
            return {"json_schema": {"type": "object"}}
        if name == "choice":
            return {"regex": _any_of(value)}
        return {"json_schema" if name == "json" else name: _parsed(value) if name == "json" else value}


def _any_of(texts: list[str]) -> str:
    regex = "|".join(map(re.escape, texts))
    if (size := len(regex.encode(errors="surrogatepass"))) > MAX_GUIDE_BYTES:
        what = f"got {size:,} bytes of texts, with what is escaped in them; allowed: at most {MAX_GUIDE_BYTES:,}; a regex may be shorter"
        raise bad_field("structured_outputs", what, ".choice")
    return regex


def _parsed(schema: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise bad_field("structured_outputs", f"{error}; allowed: a schema, or its text", ".json") from error
    if not isinstance(parsed, dict):
        raise bad_field("structured_outputs", f"got {shown(parsed)}; allowed: a JSON object", ".json")
    return parsed


def with_older_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """`guided_json` and its kind as the field `structured_outputs`. Raises ApiError: 400 where that field is there, too."""
    older = {name: value for name, value in values.items() if name in _OLDER_NAMES and value is not None}
    if older and values.get("structured_outputs") is not None:
        raise bad_field(next(iter(older)), "got one beside structured_outputs, which is its newer form; give one of them")
    others = {name: value for name, value in values.items() if name not in _OLDER_NAMES}
    return others | {"structured_outputs": {name.removeprefix(OLDER): value for name, value in older.items()}} if older else others


_OLDER_NAMES = frozenset(f"{OLDER}{name}" for name in ("json", "regex", "choice", "grammar"))
