"""Formats whose calls are in one section, each between its own marks, with arguments in JSON: DeepSeek's and Kimi's."""

from __future__ import annotations

import json
import re
from typing import ClassVar

from paged_attn.chat.formats.tool_format import MAX_CALLS_ENFORCED, Call, Mark, Taken, ToolFormat, space_end

SEPARATOR = "<｜tool▁sep｜>"  # of DeepSeek
ARGUMENTS = "<|tool_call_argument_begin|>"  # of Kimi
_FENCED = re.compile(rf"\s*\w+{SEPARATOR}([^\n]+)\n```json\n(.*?)\n```\s*", re.DOTALL)
_ID = re.compile(r"\s*((?:functions\.)?([\w.-]+?)(?::\d{1,9})?)\s*")


class SectionFormat(ToolFormat):
    """Attributes:
    section, each: the opening and the closing mark of all calls, and of each.
    between_calls: stands between two calls that are enforced, as a grammar writes it.
    """

    section: ClassVar[tuple[str, str]]
    each: ClassVar[tuple[str, str]]
    between_calls: ClassVar[str] = ""
    endings = ""

    def take(self, text: str, ended: bool) -> Taken | None:
        """All calls one after another, to the end of their section. The section's marks may be missing, and the last one's end where the
        answer ends."""
        opening, closing = self.section
        calls: list[Call | None] = []
        end = len(opening) if text.startswith(opening) else 0
        while True:
            at = space_end(text, end)
            if text.startswith(closing, at):
                end = at + len(closing)
                break
            if not text.startswith(self.each[0], at):
                if not ended and any(mark.startswith(text[at : at + len(mark)]) for mark in (closing, self.each[0])):
                    return None
                break
            stop = text.find(self.each[1], at)
            if stop < 0 and not ended:
                return None
            calls.append(self.call(text[at + len(self.each[0]) : stop if stop >= 0 else len(text)]))
            end = stop + len(self.each[1]) if stop >= 0 else len(text)
        return Taken([call for call in calls if call is not None] if None not in calls else (), end)

    def call(self, text: str) -> Call | None:
        """What stands between the marks of one call; None if that is none."""
        raise NotImplementedError

    def grammar(self, several: bool, mark: Mark) -> list[str]:
        between = f'"{self.between_calls}" ' * bool(self.between_calls)
        more = f" ({between}call){{0,{MAX_CALLS_ENFORCED - 1}}}" * several
        calls = [f"call{i}: {mark(self.each[0])} {self.enforced(i, mark)} {mark(self.each[1])}" for i in range(len(self.tools))]
        one = f"call: {' | '.join(f'call{i}' for i in range(len(calls)))}"
        return [f"calls: {mark(self.section[0])} call{more} {mark(self.section[1])}", one, *calls]

    def enforced(self, index: int, mark: Mark) -> str:
        """What a grammar has between the marks of a call of this tool."""
        raise NotImplementedError


class DeepSeekFormat(SectionFormat):
    """DeepSeek-V3.1:
    `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>`.
    V3 and R1 write `function<｜tool▁sep｜>NAME`, and the arguments in a fenced block."""

    name = "deepseek"
    section, each = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    marks = (*section, *each, SEPARATOR)
    openings = (section[0], each[0])

    def call(self, text: str) -> Call | None:
        if fenced := _FENCED.fullmatch(text):
            return Call.of(fenced[1].strip(), fenced[2].strip())
        name, separator, arguments = text.partition(SEPARATOR)
        return Call.of(name.strip(), arguments.strip()) if separator and name.strip() else None

    def enforced(self, index: int, mark: Mark) -> str:
        return f'"{self.tools[index].name}" {mark(SEPARATOR)} arguments{index}'


class FencedDeepSeekFormat(DeepSeekFormat):
    """What it reads is the same; enforced calls are of the older kind."""

    name = "deepseek_v3"
    between_calls = "\\n"

    def enforced(self, index: int, mark: Mark) -> str:
        head = json.dumps(f"{self.tools[index].name}\n```json\n")
        return f'"function" {mark(SEPARATOR)} {head} arguments{index} "\\n```"'


class KimiFormat(SectionFormat):
    """Kimi-K2: `<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>...
    <|tool_calls_section_end|>`. Its template writes a call's id where the name stands: it is the model's own."""

    name = "kimi_k2"
    section, each = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), ("<|tool_call_begin|>", "<|tool_call_end|>")
    marks = (*section, *each, ARGUMENTS)
    openings = (section[0], each[0])

    def call(self, text: str) -> Call | None:
        head, separator, arguments = text.partition(ARGUMENTS)
        named = _ID.fullmatch(head)
        return Call.of(named[2], arguments.strip(), named[1] if ":" in named[1] else "") if named and separator else None

    def enforced(self, index: int, mark: Mark) -> str:
        return f'"functions.{self.tools[index].name}:" /[0-9]{{1,3}}/ {mark(ARGUMENTS)} arguments{index}'
