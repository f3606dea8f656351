"""Calls as plain JSON: `{"name": ..., "arguments": {...}}`, or a list of such objects. For calls that are enforced where the model has no
format of its own, or one that no grammar of ours describes; and as Llama 3 writes them."""

from __future__ import annotations

from typing import ClassVar

from paged_attn.chat.formats.tool_format import SPACE, Mark, Taken, ToolFormat, calls_of, json_calls_grammar, load_first_json, repeated

PYTHON_TAG = "<|python_tag|>"


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
