"""A grammar for answers that must call a tool, or that are calls or JSON of a schema."""

from __future__ import annotations

import json
from typing import Any

from paged_attn.chat.answers.reasoning import ThinkTags, grammar_of
from paged_attn.chat.formats.harmony import HarmonyFormat
from paged_attn.chat.formats.tool_format import ToolFormat
from paged_attn.chat.marks import own_token
from paged_attn.engine.sampling.structured.compile_process import JSON_DEFAULTS

_PLAIN = {"type", "properties", "required", "description", "title", "$defs", "definitions"}
CALL_OPTIONS: Any = {"whitespace_pattern": "[ \\n]?"}  # models write calls on one line


def calls_grammar(
    tokenizer: Any, format: ToolFormat, several: bool, tags: ThinkTags | None, inside: bool, schema: str | None = None
) -> str:
    """In llguidance's dialect of Lark: reasoning, if there is any, and then calls.

    Args:
        format: how calls are written, of the tools that may be called.
        several: whether there may be more than one.
        inside: the answer begins with reasoning.
        schema: of JSON that the answer may be instead of calls; None: it is calls.
    """

    def mark(text: str) -> str:
        """What a grammar calls a text: a token, if it is one of its own."""
        id = own_token(tokenizer, text)
        return json.dumps(text, ensure_ascii=False) if id is None else f"<[{id}]>"

    before, rules = grammar_of(tags, inside, mark)
    start = f"start: {before}calls" if schema is None else f"start: {before}(calls | answer)"
    rules += format.grammar(several, mark)
    rules += [f"arguments{i}: %json {_schema_text(_closed(tool.parameters), CALL_OPTIONS)}" for i, tool in enumerate(format.tools)]
    if schema is not None:
        head = format.answer(mark) if isinstance(format, HarmonyFormat) else ""
        rules += [f"answer: {head}json", f"json: %json {_schema_text(json.loads(schema), JSON_DEFAULTS)}"]
    return "\n".join([start, *rules, ""])


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object, also where the schema leaves that out; it has what it lists, unless the schema says otherwise."""
    object_only = {**parameters, "type": "object"}
    return {**object_only, "additionalProperties": False} if parameters.keys() <= _PLAIN else object_only


def _schema_text(schema: dict[str, Any], options: Any) -> str:
    """On one line, with our options unless it brings its own."""
    return json.dumps({"x-guidance": options, **schema})
