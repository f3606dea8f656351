"""Calls of Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

from __future__ import annotations

import json
import re
from typing import Any

from paged_attn.chat.formats.hermes import CLOSING, OPENING
from paged_attn.chat.formats.tool_format import Call, Taken, ToolFormat, as_text

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


class QwenCoderFormat(ToolFormat):
    """Values are text; the tool's schema says which of them are meant as something else."""

    name = "qwen_coder"
    marks = (OPENING, CLOSING)
    openings = (OPENING,)
    endings = ">"

    def take(self, text: str, ended: bool) -> Taken | None:
        close = text.find(CLOSING)
        if close < 0 and not ended:
            return None
        body, end = (text[len(OPENING) : close], close + len(CLOSING)) if close >= 0 else (text[len(OPENING) :], len(text))
        call = self._call(body)
        return Taken(() if call is None else (call,), end)

    def _call(self, body: str) -> Call | None:
        function = _FUNCTION.fullmatch(body)
        if function is None or _PARAMETER.sub("", function[2]).strip():
            return None
        name = function[1].strip()
        properties = next((tool.parameters.get("properties") for tool in self.tools if tool.name == name), None)
        schemas = properties if isinstance(properties, dict) else {}
        found = {key.strip(): _value(value, schemas.get(key.strip())) for key, value in _PARAMETER.findall(function[2])}
        arguments = as_text(found)
        return None if arguments is None else Call(name, arguments)


def _value(text: str, schema: Any) -> Any:
    """What a value is by its schema; its text where the schema says so, says nothing, or it is nothing else."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind is None or kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    try:
        return json.loads(text.lower() if kind == "boolean" else text)
    except (ValueError, RecursionError):
        return text
