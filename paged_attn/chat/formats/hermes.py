"""Calls of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json

from paged_attn.chat.formats.tool_format import Mark, Taken, ToolFormat, calls_of, json_calls_grammar, load_json, repeated

OPENING, CLOSING = "<tool_call>", "</tool_call>"
MAX_CLOSINGS = 64  # closing tags that may occur in the strings of one call


class HermesFormat(ToolFormat):
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
