"""Answers of /v1/messages, whole or event by event."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from paged_attn.asynchronous.errors import ServingError
from paged_attn.asynchronous.job import Job
from paged_attn.asynchronous.texts import Texts
from paged_attn.chat.answers.answer_form import read_event
from paged_attn.chat.parts import Content, Part, ToolCall
from paged_attn.engine.requests.request import Request
from paged_attn.server.api.messages.body import MessagesBody
from paged_attn.server.http.errors import ApiError, anthropic_payload, api_error

Event = dict[str, Any]


class MessagesReply:
    """The answer to a job of one prompt and one answer."""

    def __init__(self, job: Job, body: MessagesBody, texts: Texts, model: str) -> None:
        form = job.prompts[0].form
        assert form is not None
        self.job, self._form, self._blocks = job, form, Blocks()
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    async def whole(self) -> dict[str, Any]:
        """Raises ServingError if the request failed."""
        (request,) = await self.job.finished()
        reader = self._form.reader()
        for part in (*reader.feed(request.completion().text), *reader.finish()):
            list(self._blocks.add(part))
        list(self._blocks.close())
        return {**self._head, "content": self._blocks.done, **self._end(request), "usage": self._usage()}

    async def lines(self) -> AsyncIterator[list[str]]:
        """The server-sent events, in groups of what there is to tell at once; an error after the beginning is the last."""
        try:
            async for events in self._events():
                yield [_line(event) for event in events]
        except (ApiError, ServingError) as error:
            yield [_line(anthropic_payload(api_error(error)))]

    async def _events(self) -> AsyncIterator[list[Event]]:
        start: Event = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
        yield [{"type": "message_start", "message": start}]
        reader = self._form.reader()
        async for batch in self.job.batches():
            yield [told for _, event in batch for part in read_event(reader, event) for told in self._blocks.add(part)]
        ended = {"type": "message_delta", "delta": self._end(self.job.requests[0]), "usage": self._usage()}
        yield [*self._blocks.close(), ended, {"type": "message_stop"}]

    def _end(self, request: Request) -> dict[str, Any]:
        """Why the answer ended."""
        stopped = request.stop_reason if isinstance(request.stop_reason, str) else None
        if request.finish_reason == "length":
            reason = "max_tokens"
        elif self._blocks.num_calls:
            reason, stopped = "tool_use", None
        else:
            reason = "end_turn" if stopped is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _usage(self, new: int | None = None) -> dict[str, Any]:
        """Counts of tokens. As in Anthropic's API those that came from the cache are beside `input_tokens`; at the beginning of a stream
        nobody knows yet how many these are."""
        counts = self.job.usage(new)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached, "output_tokens": counts["completion_tokens"],
            "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0,
        }  # fmt: skip


def _line(event: Event) -> str:
    # ASCII: some clients end a line at U+2028 or U+0085.
    return f"event: {event['type']}\ndata: {json.dumps(event)}"


class Blocks:
    """Takes the parts of one answer in order. `done`: whole blocks; `num_calls`: how many of them call a tool."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self.num_calls = 0
        self._open: dict[str, Any] | None = None

    def add(self, part: Part) -> Iterator[Event]:
        """The events of the next part."""
        if isinstance(part, ToolCall):
            yield from self.close()
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            yield from self._begin(block)
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
            block["input"] = json.loads(part.arguments)
            self.num_calls += 1
            yield from self.close()
            return
        kind = "text" if isinstance(part, Content) else "thinking"
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            signature = {} if kind == "text" else {"signature": ""}
            yield from self._begin({"type": kind, kind: "", **signature})
        assert self._open is not None
        self._open[kind] += part.text
        yield self._delta({"type": f"{kind}_delta", kind: part.text})

    def close(self) -> Iterator[Event]:
        """The block that is open ends."""
        if self._open is None:
            return
        if self._open["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": len(self.done)}
        self.done.append(self._open)
        self._open = None

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        self._open = block
        yield {"type": "content_block_start", "index": len(self.done), "content_block": dict(block)}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": len(self.done), "delta": delta}
