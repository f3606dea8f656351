"""Calls of DeepSeek-V3.1:
`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>`.
V3 and R1 write `function<｜tool▁sep｜>NAME`, and the arguments in a fenced block."""

from __future__ import annotations

import json
import re

from paged_attn.chat.formats.section import SectionFormat, arguments_of
from paged_attn.chat.formats.tool_format import Call, Mark

SECTION, SEPARATOR = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), "<｜tool▁sep｜>"
CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_FENCED = re.compile(rf"\s*\w+{SEPARATOR}([^\n]+)\n```json\n(.*?)\n```\s*", re.DOTALL)


class DeepSeekFormat(SectionFormat):
    name = "deepseek"
    section, each = SECTION, CALL
    marks = (*SECTION, *CALL, SEPARATOR)
    openings = (SECTION[0], CALL[0])

    def call(self, text: str) -> Call | None:
        if fenced := _FENCED.fullmatch(text):
            return arguments_of(fenced[1].strip(), fenced[2])
        name, separator, arguments = text.partition(SEPARATOR)
        return arguments_of(name.strip(), arguments) if separator and name.strip() else None

    def enforced(self, index: int, mark: Mark) -> str:
        return f'"{self.tools[index].name}" {mark(SEPARATOR)} arguments{index}'


class FencedDeepSeekFormat(DeepSeekFormat):
    """What it reads is the same; enforced calls are of the older kind."""

    name = "deepseek_v3"
    between_calls = "\\n"

    def enforced(self, index: int, mark: Mark) -> str:
        head = json.dumps(f"{self.tools[index].name}\n```json\n")
        return f'"function" {mark(SEPARATOR)} {head} arguments{index} "\\n```"'
