"""Calls of GLM-4.5 and later: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, on lines or not."""

from __future__ import annotations

import re

from paged_attn.chat.formats.tagged.tagged_format import TaggedFormat
from paged_attn.chat.formats.tool_format import Call

_NAME = re.compile(r"\s*([^<\s]+)\s*(?=<|\Z)")
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class GlmFormat(TaggedFormat):
    name = "glm"

    def call(self, body: str) -> Call | None:
        head = _NAME.match(body)
        return None if head is None else self.call_of(head[1], body[head.end() :], _ARGUMENT)
