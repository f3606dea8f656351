"""Calls of Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`; Seed-OSS has its
own tag around the same.
"""

from __future__ import annotations

import re

from paged_attn.chat.formats.tagged.tagged_format import TaggedFormat
from paged_attn.chat.formats.tool_format import Call

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class QwenCoderFormat(TaggedFormat):
    name = "qwen_coder"

    def call(self, body: str) -> Call | None:
        function = _FUNCTION.fullmatch(body)
        return None if function is None else self.call_of(function[1].strip(), function[2], _PARAMETER)


class SeedFormat(QwenCoderFormat):
    name = "seed_oss"
    marks = ("<seed:tool_call>", "</seed:tool_call>")
    openings = ("<seed:tool_call>",)
