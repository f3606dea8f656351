"""Separates tool calls from the rest of an answer as it arrives."""

from __future__ import annotations

from paged_attn.chat.formats.tool_format import SPACE, Call, Taken, ToolFormat, as_json
from paged_attn.chat.parts import Content, Part, ToolCall

EAGER = 4096  # up to this many characters, a possible call is parsed again with each new piece
GROWTH = 17 / 16  # a longer one is parsed again when it has grown by this factor, so that the time is in proportion to its length


class CallSplitter:
    """Takes calls out of an answer; the rest is content. So is what looks like a call and is none, or is not whole when the answer ends.

    Space around calls is left out, and kept in an answer without calls.

    Args:
        format: how calls are written.
        most: the most calls of an answer; None: any number. All that follows is content; calls of the same list become JSON again.
    """

    def __init__(self, format: ToolFormat, most: int | None = None) -> None:
        self._format, self._most = format, most
        self._text = ""  # not returned yet
        self._space = ""  # trailing space of the text so far; a call may follow it
        self._may_end = False  # since it was last parsed, a character has come with which a call may end
        self._looked_at = 0  # length of the possible call when it was last parsed and was not whole
        self._num_calls = 0
        self._ids = set[str]()
        self._has_content = self._follows_call = False

    def feed(self, text: str) -> list[Part]:
        self._text += text
        self._may_end |= not self._format.endings or any(ending in text for ending in self._format.endings)
        return self._read(ended=False)

    def finish(self) -> list[Part]:
        parts = self._read(ended=True)
        if self._space and not self._num_calls:
            parts.append(Content(self._space))
        self._space = ""
        return parts

    def _read(self, ended: bool) -> list[Part]:
        parts: list[Part] = []
        while self._text:
            if self._num_calls == self._most:
                at, is_sure = len(self._text), True
            else:
                if self._follows_call:
                    self._text = self._text.lstrip(self._format.between)
                at, is_sure = self._format.begins(self._text, not self._has_content)
            parts += self._content(at)
            if not self._text or not (is_sure or ended):
                break
            if not is_sure:
                parts += self._content(len(self._text))
                break
            is_worth_a_look = self._may_end and (len(self._text) <= EAGER or len(self._text) >= GROWTH * self._looked_at)
            if not ended and not is_worth_a_look:
                break
            taken = self._format.take(self._text, ended)
            if taken is None:
                self._may_end, self._looked_at = False, len(self._text)
                break
            parts += self._calls(taken) if taken.calls else self._content(taken.end)
        return parts

    def _calls(self, taken: Taken) -> list[Part]:
        room = len(taken.calls) if self._most is None else self._most - self._num_calls
        calls, others = taken.calls[:room], taken.calls[room:]
        self._text, self._looked_at = as_json(others) + self._text[taken.end :], 0
        self._num_calls += len(calls)
        self._follows_call = True
        if not self._has_content:
            self._space = ""
        return [ToolCall(self._id(call), call.name, call.arguments) for call in calls]

    def _id(self, call: Call) -> str:
        """The model's own, unless an earlier call of the answer has it."""
        id = call.id if call.id and call.id not in self._ids else self._format.new_id()
        self._ids.add(id)
        return id

    def _content(self, end: int) -> list[Part]:
        if not end:
            return []
        text = self._space + self._text[:end]
        self._text, self._looked_at = self._text[end:], 0
        content = text.rstrip(SPACE)
        self._space = text[len(content) :]
        if not content:
            return []
        self._has_content, self._follows_call = True, False
        return [Content(content)]
