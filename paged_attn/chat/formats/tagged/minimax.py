"""Calls of MiniMax-M2: `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>...</minimax:tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paged_attn.chat.formats.tagged.tagged_format import TaggedFormat, one_after_another
from paged_attn.chat.formats.tool_format import Call

_INVOKE = re.compile(r"<invoke name=\"?([^\">\n]+)\"?>(.*?)</invoke>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter name=\"?([^\">\n]+)\"?>\n?(.*?)\n?</parameter>", re.DOTALL)


class MiniMaxFormat(TaggedFormat):
    name = "minimax"
    marks = ("<minimax:tool_call>", "</minimax:tool_call>")
    openings = ("<minimax:tool_call>",)

    def calls(self, body: str) -> Sequence[Call]:
        invokes = one_after_another(_INVOKE, body) or ()
        calls = [self.call_of(name, arguments, _PARAMETER) for name, arguments in invokes]
        return [call for call in calls if call is not None] if None not in calls else ()
