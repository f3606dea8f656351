"""Formats whose calls lie between two marks, and whose arguments are plain text between tags. The tool's schema tells which texts are meant
as something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from paged_attn.chat.formats.json_calls import CLOSING, OPENING
from paged_attn.chat.formats.tool_format import Call, Taken, ToolFormat, space_end
from paged_attn.chat.tools import Tool

MAX_DEPTH = 8  # nesting of schemas
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
_NAME = re.compile(r"\s*([^<\s]+)\s*(?=<|\Z)")
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_INVOKE = re.compile(r"<invoke name=\"?([^\">\n]+)\"?>(.*?)</invoke>", re.DOTALL)
_NAMED_PARAMETER = re.compile(r"<parameter name=\"?([^\">\n]+)\"?>\n?(.*?)\n?</parameter>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class TaggedFormat(ToolFormat):
    """Values are text; the tool's schema says which of them are meant as something else. `marks`: the opening and the closing one."""

    marks: ClassVar[tuple[str, ...]] = (OPENING, CLOSING)
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    endings = ">"

    def take(self, text: str, ended: bool) -> Taken | None:
        opening, closing = self.marks
        close = text.find(closing)
        if close < 0 and not ended:
            return None
        body, end = (text[len(opening) : close], close + len(closing)) if close >= 0 else (text[len(opening) :], len(text))
        return Taken(self.calls(body), end)

    def calls(self, body: str) -> Sequence[Call]:
        """What lies between the marks; () if that is not a call."""
        call = self.call(body)
        return () if call is None else (call,)

    def call(self, body: str) -> Call | None:
        """The one call that lies between the marks, in formats that have one there; None if it is none."""
        raise NotImplementedError

    def call_of(self, name: str, arguments: str, pattern: re.Pattern[str]) -> Call | None:
        """A call whose arguments fit the pattern one after another, each with its key and its value; None if anything else is there."""
        pairs = one_after_another(pattern, arguments)
        if pairs is None:
            return None
        tool = next((tool for tool in self.tools if tool.name == name), None)
        return Call.of(name, {key.strip(): argument_value(value, tool, key.strip()) for key, value in pairs})


class GlmFormat(TaggedFormat):
    """GLM-4.5 and later: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, on lines or not."""

    name = "glm"

    def call(self, body: str) -> Call | None:
        head = _NAME.match(body)
        return None if head is None else self.call_of(head[1], body[head.end() :], _ARGUMENT)


class MiniMaxFormat(TaggedFormat):
    """MiniMax-M2: `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>...</minimax:tool_call>`."""

    name = "minimax"
    marks = ("<minimax:tool_call>", "</minimax:tool_call>")
    openings = ("<minimax:tool_call>",)

    def calls(self, body: str) -> Sequence[Call]:
        invokes = one_after_another(_INVOKE, body) or ()
        calls = [self.call_of(name, arguments, _NAMED_PARAMETER) for name, arguments in invokes]
        return [call for call in calls if call is not None] if None not in calls else ()


class QwenCoderFormat(TaggedFormat):
    """Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

    name = "qwen_coder"

    def call(self, body: str) -> Call | None:
        function = _FUNCTION.fullmatch(body)
        return None if function is None else self.call_of(function[1].strip(), function[2], _PARAMETER)


class SeedFormat(QwenCoderFormat):
    """Seed-OSS: its own tag around the same."""

    name = "seed_oss"
    marks = ("<seed:tool_call>", "</seed:tool_call>")
    openings = ("<seed:tool_call>",)


def one_after_another(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]] | None:
    """The two groups of each match, with nothing but space between them; None if anything else is there. Takes time in proportion to the
    text, where a pattern that begins with space and is searched for does not."""
    found, at = list[tuple[str, str]](), 0
    while (at := space_end(text, at)) < len(text):
        match = pattern.match(text, at)
        if match is None:
            return None
        found.append((match[1], match[2]))
        at = match.end()
    return found


def argument_value(text: str, tool: Tool | None, key: str) -> Any:
    """The argument `key`: its text where the schema allows one or says nothing, else the JSON that it is; its text if it is none.

    A nullable text that is `null` (or Python's `None`) is null.
    """
    properties = None if tool is None else tool.parameters.get("properties")
    types = _types(properties.get(key), tool.parameters) if tool is not None and isinstance(properties, Mapping) else set[str]()
    if "null" in types and text.strip() in ("null", "None"):
        return None
    if not types or "string" in types:
        return text
    try:
        return json.loads(text.lower() if "boolean" in types and text.strip() in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """JSON types that a schema names, itself or in its parts; none if it says nothing."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    kind = schema.get("type")
    found = {each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)}
    if schema.get("nullable") is True:
        found.add("null")
    values = schema.get("enum") if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if not found:
        found = {_TYPES[type(value)] for value in values or () if type(value) in _TYPES}
    for part in ("anyOf", "oneOf", "allOf"):
        for each in schema[part] if isinstance(schema.get(part), list) else ():
            found |= _types(each, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        found |= _types(target, root, depth + 1)
    return found
