"""Calls as JSON: plain, `{"name": ..., "arguments": {...}}` or a list of such objects, for calls that are enforced where the model has no
format of its own, or one that no grammar of ours describes; and as Llama 3, Hermes and Qwen write them."""

from __future__ import annotations

import json
from typing import ClassVar

from paged_attn.chat.formats.tool_format import (
    SPACE,
    Mark,
    Taken,
    ToolFormat,
    calls_of,
    json_calls_grammar,
    load_first_json,
    load_json,
    repeated,
)

PYTHON_TAG = "<|python_tag|>"
OPENING, CLOSING = "<tool_call>", "</tool_call>"
MAX_CLOSINGS = 64  # closing tags that may occur in the strings of one call


class JsonFormat(ToolFormat):
    name = "json"
    marks: ClassVar[tuple[str, ...]] = ()
    openings = ("{", "[")
    at_beginning = True
    endings = "}]"
    takes_lists: ClassVar[bool] = True

    def take(self, text: str, ended: bool) -> Taken | None:
        found = load_first_json(text, next((len(mark) for mark in self.marks if text.startswith(mark)), 0))
        if found is None:
            return Taken((), len(text)) if ended else None
        value, end = found
        calls = calls_of(value) if self.takes_lists or isinstance(value, dict) else []
        return Taken(calls if all(self.knows(call.name) for call in calls) else (), end)

    def grammar(self, several: bool, mark: Mark) -> list[str]:
        calls = '"[" ' + repeated("body", '"," /[ \\n]?/', several) + ' "]"' if several else "body"
        return [f"calls: {calls}", *json_calls_grammar(self.tools, "arguments")]


class LlamaFormat(JsonFormat):
    """Calls of Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, several of them with `;` in between."""

    name = "llama3"
    marks = (PYTHON_TAG,)
    openings = ("{", PYTHON_TAG)
    between = SPACE + ";,"
    endings = "}"
    takes_lists = False

    def grammar(self, several: bool, mark: Mark) -> list[str]:
        return ["calls: " + repeated("body", '";" / ?/', several), *json_calls_grammar(self.tools, "parameters")]


class HermesFormat(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""

    name = "hermes"
    marks = (OPENING, CLOSING)
    openings = (OPENING,)
    endings = ">"

    def take(self, text: str, ended: bool) -> Taken | None:
        close = text.find(CLOSING)
        for _ in range(MAX_CLOSINGS):
            if close < 0:
                break
            end = close + len(CLOSING)
            try:
                return Taken(calls_of(load_json(text[len(OPENING) : close])), end)
            except json.JSONDecodeError as error:
                if not error.msg.startswith("Unterminated string"):
                    return Taken((), end)
            except ValueError:
                return Taken((), end)
            close = text.find(CLOSING, end)  # that closing tag was inside a string
        else:
            return Taken((), close if close > 0 else len(text))
        if not ended:
            return None
        try:
            return Taken(calls_of(load_json(text[len(OPENING) :])), len(text))
        except ValueError:
            return Taken((), len(text))

    def grammar(self, several: bool, mark: Mark) -> list[str]:
        call = f"call: {mark(OPENING)} /\\n?/ body /\\n?/ {mark(CLOSING)}"
        return ["calls: " + repeated("call", "/[ \\n]?/", several), call, *json_calls_grammar(self.tools, "arguments")]
