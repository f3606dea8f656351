"""What formats share whose calls lie between two marks, and whose arguments are plain text between tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from paged_attn.chat.formats.hermes import CLOSING, OPENING
from paged_attn.chat.formats.tagged.argument_values import argument_value
from paged_attn.chat.formats.tool_format import Call, Taken, ToolFormat, as_text


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
        """What lies between the marks; () if that is no call."""
        call = self.call(body)
        return () if call is None else (call,)

    def call(self, body: str) -> Call | None:
        """The one call that lies between the marks, in formats that have one there; None if it is none."""
        raise NotImplementedError

    def call_of(self, name: str, arguments: str, pattern: re.Pattern[str]) -> Call | None:
        """A call whose arguments fit the pattern one after another, each with its key and its value; None if anything else is there."""
        if pattern.sub("", arguments).strip():
            return None
        tool = next((tool for tool in self.tools if tool.name == name), None)
        found = {key.strip(): argument_value(value, tool, key.strip()) for key, value in pattern.findall(arguments)}
        text = as_text(found)
        return None if text is None else Call(name, text)
