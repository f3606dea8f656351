"""Parses answers with the tokenizer's own response template, if it has one (transformers 5)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from paged_attn.chat.formats.tool_format import Call, ToolFormat, as_json, as_text
from paged_attn.chat.parts import Content, Part, Reasoning, ToolCall
from paged_attn.chat.tools import Tool
from paged_attn.shown import is_utf8

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
SLICE = 64  # characters that are read at a time; where the parser fails among them, they are read again one by one
UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)


class TemplateReader:
    """By `tokenizer.get_response_parser`. A call that it cannot read becomes content, and so does all that follows it.

    Args:
        prefix: the prompt, which may hold the beginning of the answer.
        tools: types of arguments are looked up in them; none: calls are content.
        most: the most calls of an answer; None: any number. What follows them is content.

    Raises:
        ValueError: the response template cannot be read.
    """

    def __init__(self, tokenizer: Any, prefix: str, tools: Sequence[Tool], most: int | None) -> None:
        given = [tool.given for tool in tools] or None
        self._new_parser = partial(tokenizer.get_response_parser, prefix=prefix, tools=given)
        self._parser: Any = self._new_parser()
        self._closings = _closings(tokenizer.response_template)
        self._has_tools, self._most = bool(tools), most
        self._text, self._read = "", 0  # all of it, and up to where it was returned or belongs to a call
        self._call_begins: int | None = None
        self._num_calls = 0
        self._has_failed = False
        self._spaces = {"content": "", "reasoning": ""}  # trailing space of each text so far
        self._begun = set[str]()

    def feed(self, text: str) -> list[Part]:
        return [part for start in range(0, len(text), SLICE) for part in self._feed(text[start : start + SLICE])]

    def finish(self) -> list[Part]:
        if self._has_failed:
            return []
        try:
            _, events = self._parser.finalize()
        except UNREADABLE:
            return self._failed()
        return self._parts(events)

    def _feed(self, text: str) -> list[Part]:
        if self._has_failed:
            return [Content(text)]
        self._text += text
        try:
            events = self._parser.feed(text)
        except UNREADABLE:
            return [*self._parts_before_error(len(text)), *self._failed()]
        return self._parts(events)

    def _parts_before_error(self, new: int) -> list[Part]:
        """Parts in the last `new` characters, in which the parser failed and returned nothing of what it had read by then."""
        parser, parts, start = self._new_parser(), list[Part](), len(self._text) - new
        try:
            for at in range(0, start, SLICE):
                parser.feed(self._text[at : min(at + SLICE, start)])
            for character in self._text[start:]:
                parts += self._parts(parser.feed(character))
        except UNREADABLE:
            pass
        return parts

    def _failed(self) -> list[Part]:
        self._has_failed = True
        return self._as_content(len(self._text))

    def _as_content(self, end: int) -> list[Part]:
        start = self._read if self._call_begins is None else self._call_begins
        text, self._read, self._call_begins = self._spaces["content"] + self._text[start:end], end, None
        self._spaces["content"] = ""
        return [Content(text)] if text else []

    def _parts(self, events: list[dict[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            kind, field = event["type"], event["field"]
            if kind == "region_close" and (closing := self._closings.get(field)) is not None:
                at = self._read + len(self._text[self._read :]) - len(self._text[self._read :].lstrip())
                self._read = mark.end() if (mark := closing.match(self._text, at)) is not None else self._read
            if kind == "region_open" and field == "tool_calls":
                self._call_begins = self._read
            elif kind == "region_chunk":
                at = self._text.find(event["text"], self._read)
                self._read = max(at, self._read) + len(event["text"]) if at >= 0 else self._read
                if not event["dirty"] and field == "content":
                    parts += [Content(text) for text in self._trimmed("content", event["text"])]
                elif not event["dirty"] and field in REASONING_FIELDS:
                    parts += [Reasoning(text) for text in self._trimmed("reasoning", event["text"])]
            elif kind == "region_close" and field == "tool_calls":
                parts += self._calls(event["value"])
        return parts

    def _trimmed(self, kind: str, text: str) -> list[str]:
        """Without space at the beginning and at the end of all text of this kind, as the template's own values are."""
        text = self._spaces[kind] + text
        if kind not in self._begun:
            text = text.lstrip()
        told = text.rstrip()
        self._spaces[kind] = text[len(told) :]
        if told:
            self._begun.add(kind)
        return [told] if told else []

    def _calls(self, value: Any) -> list[Part]:
        """Told as content if one of them is not a call."""
        listed = value if isinstance(value, list) else [value]
        functions = [each.get("function", each) if isinstance(each, dict) else {} for each in listed]
        found = [(function.get("name"), as_text(function.get("arguments"))) for function in functions]
        calls = [Call(name, text) for name, text in found if isinstance(name, str) and is_utf8(name) and text is not None]
        room = len(calls) if self._most is None else self._most - self._num_calls
        if not self._has_tools or len(calls) < len(found) or (calls and room <= 0):
            return self._as_content(self._read)
        self._num_calls += len(calls[:room])
        self._call_begins = None
        others = as_json(calls[room:])
        told: list[Part] = [ToolCall(ToolFormat.new_id(), call.name, call.arguments) for call in calls[:room]]
        return [*told, Content(others)] if others else told


def _closings(template: Any) -> dict[str, re.Pattern[str]]:
    """The marks at the end of each field, which events do not tell."""
    patterns = {}
    for name, field in (template["fields"] if isinstance(template, Mapping) else {}).items():
        close = field.get("close") or []
        literal = "|".join(map(re.escape, [close] if isinstance(close, str) else close))
        patterns[name] = field.get("close_pattern") or literal
    return {name: re.compile(pattern) for name, pattern in patterns.items() if pattern}
