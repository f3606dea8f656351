"""Calls of Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, several of them with `;` in between."""

from __future__ import annotations

from paged_attn.chat.formats.json_calls import JsonFormat
from paged_attn.chat.formats.tool_format import SPACE, Mark, Taken, calls_of, json_calls_grammar, load_first_json, repeated

PYTHON_TAG = "<|python_tag|>"


class LlamaFormat(JsonFormat):
    name = "llama3"
    marks = (PYTHON_TAG,)
    openings = ("{", PYTHON_TAG)
    between = SPACE + ";,"
    endings = "}"

    def take(self, text: str, ended: bool) -> Taken | None:
        start = len(PYTHON_TAG) if text.startswith(PYTHON_TAG) else 0
        found = load_first_json(text, start)
        if found is None:
            return Taken((), len(text)) if ended else None
        value, end = found
        calls = calls_of(value) if isinstance(value, dict) else []
        return Taken(calls if all(self._knows(call.name) for call in calls) else (), end)

    def grammar(self, several: bool, mark: Mark) -> list[str]:
        return ["calls: " + repeated("body", '";" / ?/', several), *json_calls_grammar(self.tools, "parameters")]
