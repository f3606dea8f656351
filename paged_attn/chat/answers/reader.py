"""Parses one answer as it arrives: text in, parts out."""

from __future__ import annotations

from typing import Protocol

from paged_attn.chat.answers.call_splitter import CallSplitter
from paged_attn.chat.answers.reasoning import ReasoningSplitter
from paged_attn.chat.parts import Content, Part
from paged_attn.engine.requests.outputs import TokenEvent


class AnswerReader(Protocol):
    """Reads one answer. The parts of a text are the same however it is cut, up to how contents are cut."""

    def feed(self, text: str) -> list[Part]:
        """What can be told after the next piece of the text."""

    def finish(self) -> list[Part]:
        """What is left when no more text comes."""


def read_event(reader: AnswerReader, event: TokenEvent) -> list[Part]:
    """What can be told after an event of the answer; all that is left, if it is the last one."""
    parts = reader.feed(event.text) if event.text else []
    return parts if event.finish_reason is None else parts + reader.finish()


class TaggedReader:
    """By the tags of reasoning and the format of calls.

    Args:
        calls: None: no calls are looked for.
    """

    def __init__(self, reasoning: ReasoningSplitter, calls: CallSplitter | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    def feed(self, text: str) -> list[Part]:
        return self._take(self._reasoning.feed(text))

    def finish(self) -> list[Part]:
        parts = self._take(self._reasoning.finish())
        return parts if self._calls is None else parts + self._calls.finish()

    def _take(self, found: list[Part]) -> list[Part]:
        if self._calls is None:
            return found
        return [told for part in found for told in (self._calls.feed(part.text) if isinstance(part, Content) else [part])]
