"""How the answers to one chat are constrained, decoded and parsed as they arrive: text in, parts out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paged_attn.chat.answers.call_splitter import CallSplitter
from paged_attn.chat.answers.channels import ChannelReader
from paged_attn.chat.answers.reasoning import ReasoningSplitter, ThinkTags
from paged_attn.chat.answers.response_template import TemplateReader
from paged_attn.chat.formats.tool_format import ToolFormat
from paged_attn.chat.parts import ChatMessage, Content, Part
from paged_attn.chat.tools import Tool
from paged_attn.engine.requests.outputs import TokenEvent
from paged_attn.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class AnswerForm:
    """The form of all answers to one prompt.

    Attributes:
        grammar: that the answer follows so that it calls a tool; None: nothing is enforced.
        kept: special tokens that the reader looks for, and that stay in the text.
        tags: of reasoning; starts_inside: the answer begins with it.
        format: of calls; None: none are looked for.
        most_calls: None: any number.
        template_of: a tokenizer whose response template reads the answer, instead of tags and format.
        channels: the answer is messages of several channels (gpt-oss), instead of tags and format.
        prompt, tools: what the response template or the reader of channels is given.
    """

    grammar: str | None = None
    kept: frozenset[int] = frozenset()
    tags: ThinkTags | None = None
    starts_inside: bool = False
    format: ToolFormat | None = None
    most_calls: int | None = None
    template_of: Any = None
    channels: bool = False
    prompt: str = ""
    tools: Sequence[Tool] = ()

    def with_tokenizer(self, tokenizer: Any) -> AnswerForm:
        """The same for an equal tokenizer: of those that render prompts each is one thread's."""
        return self if self.template_of is None else dataclasses.replace(self, template_of=tokenizer)

    def reader(self) -> AnswerReader:
        """A new one, for one answer."""
        if self.template_of is not None:
            return TemplateReader(self.template_of, self.prompt, self.tools, self.most_calls)
        if self.channels:
            return ChannelReader(self.prompt, bool(self.tools), self.most_calls)
        calls = None if self.format is None else CallSplitter(self.format, self.most_calls)
        return TaggedReader(ReasoningSplitter(self.tags, self.starts_inside), calls)

    def read(self, text: str) -> ChatMessage:
        """A whole answer."""
        reader = self.reader()
        parts = reader.feed(text)
        return ChatMessage.of(parts + reader.finish())

    def enforced(self, params: SamplingParams) -> SamplingParams:
        """The same params, with the grammar; it holds the schema that they may have had."""
        return params if self.grammar is None else params.changed(grammar=self.grammar, json_schema=None)


def finish_reason(reason: str, has_calls: bool) -> str:
    """The finish reason of an answer that the engine has ended for `reason`."""
    return "tool_calls" if has_calls and reason == "stop" else str(reason)


class AnswerReader(Protocol):
    """Reads one answer. The parts of a text are the same however it is cut, up to how contents are cut."""

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain after the next piece of the text."""

    def finish(self) -> list[Part]:
        """What is left when no more text comes."""


def read_event(reader: AnswerReader, event: TokenEvent) -> list[Part]:
    """The parts that are certain after an event of the answer; all that is left if it is the last one."""
    parts = reader.feed(event.text) if event.text else []
    return parts if event.finish_reason is None else parts + reader.finish()


class TaggedReader:
    """By the tags of reasoning and the format of calls. Without `calls` no calls are looked for."""

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
        return [each for part in found for each in (self._calls.feed(part.text) if isinstance(part, Content) else [part])]
