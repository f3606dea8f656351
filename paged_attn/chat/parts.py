"""The parts of an answer: content, reasoning and tool calls, piece by piece and as one message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Content:
    """The next piece of what the answer says."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """The next piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call, whole. `id`: for the message of role `tool` that brings the result; `arguments`: a JSON object, as text."""

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        """As OpenAI's messages hold it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Part = Content | Reasoning | ToolCall


@dataclass(frozen=True)
class ChatMessage:
    """An answer taken apart. It may stand among the messages of the next call as it is.

    Attributes:
        content: None if the answer is calls and nothing else.
        reasoning_content: None if there is none, or if the template does not tell how it is marked.
        tool_calls: in order.
    """

    content: str | None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    role: str = "assistant"

    @classmethod
    def of(cls, parts: Iterable[Part]) -> ChatMessage:
        parts = list(parts)
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = tuple(part for part in parts if isinstance(part, ToolCall))
        return cls(None if calls and not content else content, reasoning or None, calls)

    def as_dict(self) -> dict[str, Any]:
        """As OpenAI's API has it; reasoning and calls are left out where there are none."""
        reasoning = {} if self.reasoning_content is None else {"reasoning_content": self.reasoning_content}
        calls = {"tool_calls": [call.as_dict() for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": self.role, "content": self.content, **reasoning, **calls}
