"""What formats share whose calls lie between two marks, and whose arguments are plain text between tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from paged_attn.chat.formats.hermes import CLOSING, OPENING
from paged_attn.chat.formats.tagged.argument_values import argument_value
from paged_attn.chat.formats.tool_format import Call, Taken, ToolFormat, as_text, space_end


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
        pairs = one_after_another(pattern, arguments)
        if pairs is None:
            return None
        tool = next((tool for tool in self.tools if tool.name == name), None)
        found = {key.strip(): argument_value(value, tool, key.strip()) for key, value in pairs}
        text = as_text(found)
        return None if text is None else Call(name, text)


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
