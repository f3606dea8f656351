"""Answers that consist of messages, each with a channel: gpt-oss's harmony format."""

from __future__ import annotations

import re
from typing import Literal

from paged_attn.chat.formats.harmony import CHANNEL, ENDINGS, FUNCTIONS, MESSAGE, START
from paged_attn.chat.formats.tool_format import ToolFormat, as_text
from paged_attn.chat.parts import Content, Part, Reasoning, ToolCall
from paged_attn.engine.requests.detokenizer import overlap
from paged_attn.shown import is_utf8

_RECIPIENT, _CHANNEL = re.compile(r"to=([^\s<]+)"), re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_HEADS = (START, CHANNEL, "to=")  # a message begins with one of these
_MARKS = (START, *ENDINGS)
LONGEST = max(map(len, _MARKS))
Kind = Literal["header", "plain", "content", "reasoning", "call"]


class ChannelReader:
    """The analysis channel is reasoning; calls are what is said to a function; all else is content, and so is a call that cannot be read.

    Args:
        prompt: it may end inside a message, which the answer goes on with.
        has_tools: False: calls are content.
        most: the most calls of an answer; None: any number. What follows them is content.
    """

    def __init__(self, prompt: str, has_tools: bool, most: int | None) -> None:
        self._most = most if has_tools else 0
        self._num_calls = 0
        self._held, self._header = "", ""
        self._looked_at = 0  # position from which the end of a call is searched
        self._kind: Kind = "header"
        self._kinds_given: set[type[Content | Reasoning]] = set()
        self._is_new = False  # nothing of this message was returned
        if prompt.rfind(MESSAGE) > max(map(prompt.rfind, _MARKS)):
            self._begin(prompt[prompt.rfind(START) : prompt.rfind(MESSAGE)])

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while (parts_of_text := self._next()) is not None:
            parts += parts_of_text
        return parts

    def finish(self) -> list[Part]:
        """A header without a message is left out."""
        text, self._held = self._held, ""
        if self._kind == "call":
            return self._call(text, "")
        return [] if self._kind == "header" and text.lstrip().startswith(_HEADS) else self._parts(text)

    def _next(self) -> list[Part] | None:
        """The next parts of the text that is held; None if they depend on what comes."""
        if not self._held:
            return None
        if self._kind == "header":
            return self._read_header()
        marks = (*_MARKS, CHANNEL) if self._kind == "plain" else _MARKS
        found = [(at, mark) for mark in marks if (at := self._held.find(mark, self._looked_at)) >= 0]
        if found:
            at, mark = min(found)
            text, self._held = self._held[:at], self._held[at + len(mark) if mark in ENDINGS else at :]
            parts_of_text = self._call(text, mark if mark in ENDINGS else "") if self._kind == "call" else self._parts(text)
            self._kind, self._looked_at = "header", 0
            return parts_of_text
        if self._kind == "call":
            self._looked_at = max(len(self._held) - LONGEST, 0)
            return None
        sure = len(self._held) - overlap(self._held, marks)
        text, self._held = self._held[:sure], self._held[sure:]
        return self._parts(text) if text else None

    def _read_header(self) -> list[Part] | None:
        held = self._held.lstrip()
        if not held or any(head.startswith(held) for head in _HEADS):
            return None
        if not held.startswith(_HEADS):
            self._kind, self._is_new = "plain", True
            return []
        at = held.find(MESSAGE)
        if at < 0:
            return None
        self._held = held[at + len(MESSAGE) :]
        self._begin(held[max(held.rfind(START, 0, at), 0) : at])
        return []

    def _begin(self, header: str) -> None:
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        self._header, self._is_new, self._looked_at = header, True, 0
        if recipient is not None and recipient[1] not in ("assistant", "user", "all"):
            self._kind = "call"
        else:
            self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"

    def _parts(self, text: str) -> list[Part]:
        """Messages of one kind are paragraphs."""
        if not text:
            return []
        kind = Reasoning if self._kind == "reasoning" else Content
        between = "\n\n" if self._is_new and kind in self._kinds_given else ""
        self._kinds_given.add(kind)
        self._is_new = False
        return [kind(between + text)]

    def _call(self, text: str, mark: str) -> list[Part]:
        recipient = _RECIPIENT.search(self._header)
        assert recipient is not None
        name, arguments = recipient[1].removeprefix(FUNCTIONS), as_text(text)
        is_mine = recipient[1].startswith(FUNCTIONS) and name and is_utf8(name)
        if not is_mine or arguments is None or (self._most is not None and self._num_calls >= self._most):
            self._kind = "content"
            return self._parts(f"{self._header}{MESSAGE}{text}{mark}")
        self._num_calls += 1
        return [ToolCall(ToolFormat.new_id(), name, arguments)]
