"""Calls of Kimi-K2: `<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>...
<|tool_calls_section_end|>`. Its template writes a call's id where the name stands: it is the model's own."""

from __future__ import annotations

import re

from paged_attn.chat.formats.section import SectionFormat, arguments_of
from paged_attn.chat.formats.tool_format import Call, Mark

SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
CALL, ARGUMENTS = ("<|tool_call_begin|>", "<|tool_call_end|>"), "<|tool_call_argument_begin|>"
_ID = re.compile(r"\s*((?:functions\.)?([\w.-]+?)(?::\d{1,9})?)\s*")


class KimiFormat(SectionFormat):
    name = "kimi_k2"
    section, each = SECTION, CALL
    marks = (*SECTION, *CALL, ARGUMENTS)
    openings = (SECTION[0], CALL[0])

    def call(self, text: str) -> Call | None:
        head, separator, arguments = text.partition(ARGUMENTS)
        named = _ID.fullmatch(head)
        return arguments_of(named[2], arguments, named[1] if ":" in named[1] else "") if named and separator else None

    def enforced(self, index: int, mark: Mark) -> str:
        return f'"functions.{self.tools[index].name}:" /[0-9]{{1,3}}/ {mark(ARGUMENTS)} arguments{index}'
