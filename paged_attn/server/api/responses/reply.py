"""Answers of /v1/responses, whole or event by event."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, NamedTuple

from paged_attn.asynchronous.errors import ServingError
from paged_attn.asynchronous.job import Job
from paged_attn.asynchronous.texts import Texts
from paged_attn.chat.answers.answer_form import read_event
from paged_attn.chat.parts import Content, Part, Reasoning, ToolCall
from paged_attn.server.api.responses.body import ReasoningSettings, ResponsesBody
from paged_attn.server.api.responses.tools import names_in_namespaces, shown_tools
from paged_attn.server.http.errors import ApiError, api_error

Event = dict[str, Any]


class ResponsesReply:
    """The answer to a job of one prompt and one answer. Whole it is what the last event of a stream brings."""

    def __init__(self, job: Job, body: ResponsesBody, texts: Texts, model: str) -> None:
        form = job.prompts[0].form
        assert form is not None
        self.job = job
        self._form, self._items, self._num_tokens, self._num_reasoning = form, OutputItems(names_in_namespaces(body.tools)), 0, 0
        empty = {"parameters": None, "strict": None}
        tools = [{**(empty if tool["type"] == "function" else {}), **tool} for tool in shown_tools(body.tools)]
        reasoning = body.reasoning or ReasoningSettings(effort=None, summary=None)
        format = None if body.text is None else body.text.format
        self._head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "status": "in_progress",
            "background": False, "error": None, "incomplete_details": None, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {}, "model": model, "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": None,
            "reasoning": reasoning.model_dump(), "store": False, "temperature": body.temperature,
            "text": {"format": {"type": "text"} if format is None else format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice, "tools": tools,
            "top_p": body.top_p, "truncation": "disabled", "usage": None,
        }  # fmt: skip

    async def whole(self) -> dict[str, Any]:
        """Raises ServingError if the request failed."""
        async for events in self._events():
            last = events
        response: dict[str, Any] = last[-1]["response"]
        return response

    async def lines(self) -> AsyncIterator[list[str]]:
        """The server-sent events, numbered, in groups of what there is to tell at once; an error after the beginning is the last,
        response.failed."""
        numbers = itertools.count()
        try:
            async for events in self._events():
                yield [_line(event, next(numbers)) for event in events]
        except (ApiError, ServingError) as error:
            told = api_error(error)
            failed = {"error": {"code": told.code or told.type, "message": told.message}, "output": self._items.done}
            yield [_line(self._response("failed", "failed", **failed), next(numbers))]

    async def _events(self) -> AsyncIterator[list[Event]]:
        yield [self._response(name, "in_progress") for name in ("created", "in_progress")]
        reader, items, reason = self._form.reader(), self._items, None
        async for batch in self.job.batches():
            told = list[Event]()
            for _, event in batch:
                self._num_tokens += event.token_id is not None
                parts, reason = read_event(reader, event), event.finish_reason
                for part in parts:
                    told += items.add(part)
                if any(isinstance(part, Reasoning) for part in parts):
                    self._num_reasoning = self._num_tokens
            yield told
        status, details = ("incomplete", {"reason": "max_output_tokens"}) if reason == "length" else ("completed", None)
        ended = list(items.finish(status))
        yield [*ended, self._response(status, status, incomplete_details=details, output=items.done, usage=self._usage())]

    def _response(self, event: str, status: str, **changed: Any) -> Event:
        return {"type": f"response.{event}", "response": {**self._head, "status": status, **changed}}

    def _usage(self) -> dict[str, Any]:
        """Token counts; those of reasoning go up to its end."""
        counts = self.job.usage()
        return {
            "input_tokens": counts["prompt_tokens"], "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": counts["total_tokens"],
        }  # fmt: skip


def _line(event: Event, number: int) -> str:
    # ASCII: some clients end a line at U+2028 or U+0085.
    return f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}"


class _Kind(NamedTuple):
    """How an item that holds text looks."""

    prefix: str
    part: str
    head: dict[str, Any]
    beside_text: dict[str, Any]

    def content(self, text: str) -> Event:
        return {"type": self.part, "text": text, **self.beside_text}


MESSAGE = _Kind("msg", "output_text", {"type": "message", "role": "assistant"}, {"annotations": [], "logprobs": []})
REASONING = _Kind("rs", "reasoning_text", {"type": "reasoning", "summary": []}, {})


class OutputItems:
    """Takes parts in order, of one answer. `names`: the name and the namespace of functions that have one, by what the model calls them.
    `done`: whole items."""

    def __init__(self, names: Mapping[str, dict[str, str]]) -> None:
        self._names = names
        self.done: list[dict[str, Any]] = []
        self._kind: _Kind | None = None  # kind of the open item
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
        named = self._names.get(call.name, {"name": call.name})
        item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call.id, **named}
        where = {"item_id": item["id"], "output_index": len(self.done)}
        yield self._begin({**item, "arguments": "", "status": "in_progress"})
        yield {"type": "response.function_call_arguments.delta", **where, "delta": call.arguments}
        yield {"type": "response.function_call_arguments.done", **where, "name": named["name"], "arguments": call.arguments}
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
