"""Parts of an answer as items, and the events that tell of them as they come."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

from paged_attn.chat.parts import Content, Part, ToolCall

Event = dict[str, Any]


class _Kind(NamedTuple):
    """Of an item that holds text."""

    prefix: str
    part: str
    head: dict[str, Any]
    beside_text: dict[str, Any]

    def content(self, text: str) -> Event:
        return {"type": self.part, "text": text, **self.beside_text}


MESSAGE = _Kind("msg", "output_text", {"type": "message", "role": "assistant"}, {"annotations": [], "logprobs": []})
REASONING = _Kind("rs", "reasoning_text", {"type": "reasoning", "summary": []}, {})


class OutputItems:
    """Takes parts in order, of one answer.

    Attributes:
        done: whole items.
    """

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._kind: _Kind | None = None  # of the item that is open
        self._id, self._texts = "", list[str]()

    def add(self, part: Part) -> Iterator[Event]:
        """The events of the next part."""
        if isinstance(part, ToolCall):
            yield from self.close()
            yield from self._call(part)
            return
        kind = MESSAGE if isinstance(part, Content) else REASONING
        if kind is not self._kind:
            yield from self.close()
            yield from self._open(kind)
        self._texts.append(part.text)
        yield {"type": f"response.{kind.part}.delta", **self._place, **self._logprobs(kind), "delta": part.text}

    def finish(self, status: str) -> Iterator[Event]:
        """When no part comes any more; an answer of nothing is an empty message."""
        if not self.done and self._kind is None:
            yield from self._open(MESSAGE)
        yield from self.close(status)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """The item that is open ends."""
        if self._kind is None:
            return
        kind, text, place = self._kind, "".join(self._texts), self._place
        part = kind.content(text)
        yield {"type": f"response.{kind.part}.done", **place, **self._logprobs(kind), "text": text}
        yield {"type": "response.content_part.done", **place, "part": part}
        self._kind = None
        yield self._end({**kind.head, "id": self._id, "status": status, "content": [part]})

    def _open(self, kind: _Kind) -> Iterator[Event]:
        self._kind, self._id, self._texts = kind, f"{kind.prefix}_{uuid.uuid4().hex}", []
        yield self._begin({**kind.head, "id": self._id, "status": "in_progress", "content": []})
        yield {"type": "response.content_part.added", **self._place, "part": kind.content("")}

    def _call(self, call: ToolCall) -> Iterator[Event]:
        item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call.id, "name": call.name}
        where = {"item_id": item["id"], "output_index": len(self.done)}
        yield self._begin({**item, "arguments": "", "status": "in_progress"})
        yield {"type": "response.function_call_arguments.delta", **where, "delta": call.arguments}
        yield {"type": "response.function_call_arguments.done", **where, "name": call.name, "arguments": call.arguments}
        yield self._end({**item, "arguments": call.arguments, "status": "completed"})

    def _begin(self, item: dict[str, Any]) -> Event:
        return {"type": "response.output_item.added", "output_index": len(self.done), "item": item}

    def _end(self, item: dict[str, Any]) -> Event:
        self.done.append(item)
        return {"type": "response.output_item.done", "output_index": len(self.done) - 1, "item": item}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.done), "content_index": 0}

    @staticmethod
    def _logprobs(kind: _Kind) -> dict[str, Any]:
        return {"logprobs": []} if kind is MESSAGE else {}
