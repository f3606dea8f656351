"""Calls of Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, several of them with `;` in between."""

from __future__ import annotations

from paged_attn.chat.formats.json_calls import JsonFormat
from paged_attn.chat.formats.tool_format import SPACE, Mark, json_calls_grammar, repeated

PYTHON_TAG = "<|python_tag|>"


class LlamaFormat(JsonFormat):
    name = "llama3"
    marks = (PYTHON_TAG,)
    openings = ("{", PYTHON_TAG)
    between = SPACE + ";,"
    endings = "}"
    takes_lists = False

    def grammar(self, several: bool, mark: Mark) -> list[str]:
        return ["calls: " + repeated("body", '";" / ?/', several), *json_calls_grammar(self.tools, "parameters")]
