"""Answers in OpenAI's JSON, whole or chunk by chunk: what they have in common, those to chats, and those of /v1/completions."""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from paged_attn.asynchronous.errors import ServingError
from paged_attn.asynchronous.job import Job
from paged_attn.asynchronous.texts import Texts
from paged_attn.chat.answers.answer_form import AnswerReader, finish_reason, read_event
from paged_attn.chat.parts import Content, Part, Reasoning
from paged_attn.engine.requests.outputs import Completion, TokenEvent
from paged_attn.server.api.bodies import Body, CompletionBody
from paged_attn.server.http.errors import ApiError, api_error, openai_payload

# A new token, its log-probability, the likeliest tokens with theirs.
Known = tuple[int, float, Sequence[tuple[int, float]]]
LEAST = -9999.0
MOST_BYTES = 4  # in one character, so at most this many tokens


class Reply:
    """The answer to one job. `model`: its name, as the client knows it."""

    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl"
    no_delta: ClassVar[dict[str, Any]] = {"text": ""}

    def __init__(self, job: Job, body: Body, texts: Texts, model: str) -> None:
        self.job, self.body, self.texts = job, body, texts
        self._begun = set[int]()  # choices of a stream whose prompt's ids were sent
        self.head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._opening = f"data: {json.dumps({**self.head, 'object': self.chunk_kind})[:-1]}, "  # of all chunks

    async def whole(self) -> dict[str, Any]:
        """Raises ServingError if a request failed."""
        choices = [self.choice(i, request.completion()) for i, request in enumerate(await self.job.finished())]
        return {**self.head, "object": self.kind, "choices": choices, "usage": self.job.usage()}

    async def lines(self) -> AsyncIterator[list[str]]:
        """The server-sent events, in groups of what there is to tell at once; an error after the beginning is the last but one."""
        ends_with_usage, new = self.body.includes_usage, 0

        def line(choice: dict[str, Any]) -> str:
            usage = self.job.usage(new) if self.body.repeats_usage else None
            return self._line([choice], {"usage": usage} if ends_with_usage else {})

        try:
            yield [line(choice) for choice in self.openings()]
            async for batch in self.job.batches():
                told = list[str]()
                for index, event in batch:
                    new += event.token_id is not None
                    told += map(line, self.parts(index, event))
                yield told
            ending = [self._line([], {"usage": self.job.usage()})] if ends_with_usage else []
        except (ApiError, ServingError) as error:
            ending = [f"data: {json.dumps(openai_payload(api_error(error)))}"]
        yield [*ending, "data: [DONE]"]

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        known = None if completion.logprobs is None else [known_of(s) for s in self.job.requests[index].logprobs]
        ids = {"token_ids": completion.token_ids, "prompt_token_ids": completion.prompt_token_ids} if self.body.return_token_ids else {}
        content, finish_reason = self.content(completion)
        return {
            "index": index, **content, "logprobs": None if known is None else self.logprobs(index, known),
            "finish_reason": finish_reason, "stop_reason": completion.stop_reason, **ids,
        }  # fmt: skip

    def name(self, token: int) -> str:
        """What log-probabilities call a token."""
        return f"token_id:{token}" if self.body.return_tokens_as_token_ids else self.texts.of_token(token)

    def scored(self, index: int, count: int) -> list[Known]:
        """The prompt's tokens from the second on, with so many of the likeliest."""
        return [(token, value, likely[:count]) for token, value, likely in map(known_of, self.job.requests[index].scored)]

    def prompt_scores(self, index: int, count: int) -> list[dict[str, dict[str, Any]] | None]:
        """As vLLM's server has them."""
        found: list[dict[str, dict[str, Any]] | None] = [None]
        for token in self.job.requests[index].scored:
            assert token.logprob is not None
            row: dict[int, tuple[float, int | None]] = {
                each: (value, rank) for rank, (each, value) in enumerate((token.top_logprobs or ())[:count], start=1)
            }
            row[token.token_id] = token.logprob, token.rank
            text = self.texts.of_token
            found.append({str(i): {"logprob": finite(value), "rank": rank, "decoded_token": text(i)} for i, (value, rank) in row.items()})
        return found

    def openings(self) -> list[dict[str, Any]]:
        return []

    def parts(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """The chunks of one event; none if it brings nothing to tell."""
        logprobs = None
        if event.logprob is not None and event.token_id is not None:
            logprobs = self.logprobs(index, [(event.token_id, event.logprob, event.top_logprobs or ())])
        wants_ids = bool(self.body.return_token_ids) and event.token_id is not None
        deltas, finish_reason = self.deltas(index, event)
        if not (deltas or logprobs or wants_ids or finish_reason):
            return []
        parts = [{"index": index, **delta, "logprobs": None, "finish_reason": None} for delta in deltas or [self.no_delta]]
        parts[0]["logprobs"], parts[-1]["finish_reason"] = logprobs, finish_reason
        if finish_reason:
            parts[-1]["stop_reason"] = self.job.requests[index].stop_reason
        if wants_ids:
            parts[0]["token_ids"] = [event.token_id]
            if index not in self._begun:
                self._begun.add(index)
                parts[0]["prompt_token_ids"] = self.job.requests[index].prompt_token_ids
        return parts

    def content(self, completion: Completion) -> tuple[dict[str, Any], str]:
        """What a whole answer says, and why it has ended."""
        raise NotImplementedError

    def deltas(self, index: int, event: TokenEvent) -> tuple[list[dict[str, Any]], str | None]:
        """What an event adds, and why the answer has ended, if it has."""
        raise NotImplementedError

    def logprobs(self, index: int, known: Sequence[Known]) -> dict[str, Any]:
        """Called once per choice, or with one token after the other."""
        raise NotImplementedError

    def _line(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> str:
        # ASCII: some clients end a line at U+2028 or U+0085.
        return f"{self._opening}{json.dumps({'choices': choices, **extra})[1:]}"


class ChatReply(Reply):
    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    no_delta: ClassVar[dict[str, Any]] = {"delta": {}}

    def __init__(self, job: Job, body: Body, texts: Texts, model: str) -> None:
        super().__init__(job, body, texts, model)
        form = job.prompts[0].form
        assert form is not None
        self._form = form
        self._readers: dict[int, AnswerReader] = defaultdict(form.reader)  # one per stream
        self._num_calls = [0] * job.size

    async def whole(self) -> dict[str, Any]:
        reply = await super().whole()
        count = self.body.num_prompt_logprobs()
        return reply if count is None else {**reply, "prompt_logprobs": self.prompt_scores(0, count)}

    def openings(self) -> list[dict[str, Any]]:
        opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [{"index": index, **opening} for index in range(self.job.size)]

    def content(self, completion: Completion) -> tuple[dict[str, Any], str]:
        message = self._form.read(completion.text)
        return {"message": {**message.as_dict(), "refusal": None}}, finish_reason(completion.finish_reason, bool(message.tool_calls))

    def deltas(self, index: int, event: TokenEvent) -> tuple[list[dict[str, Any]], str | None]:
        deltas = [{"delta": self._delta(index, part)} for part in read_event(self._readers[index], event)]
        ended = event.finish_reason
        return deltas, None if ended is None else finish_reason(ended, self._num_calls[index] > 0)

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        if isinstance(part, Content):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return {"reasoning_content": part.text}
        self._num_calls[index] += 1
        return {"tool_calls": [{"index": self._num_calls[index] - 1, **part.as_dict()}]}

    def logprobs(self, index: int, known: Sequence[Known]) -> dict[str, Any]:
        return {
            "content": [
                {**self._token(token, value), "top_logprobs": [self._token(*each) for each in likely]} for token, value, likely in known
            ],
            "refusal": None,
        }

    def _token(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self.name(token), "logprob": finite(value), "bytes": self.texts.bytes_of_token(token)}


def finite(value: float) -> float:
    """JSON has no infinity; OpenAI writes this."""
    return max(value, LEAST)


def known_of(sampled: Any) -> Known:
    return sampled.token_id, sampled.logprob, sampled.top_logprobs or ()


class CompletionReply(Reply):
    def __init__(self, job: Job, body: Body, texts: Texts, model: str) -> None:
        super().__init__(job, body, texts, model)
        assert isinstance(body, CompletionBody)
        self.body: CompletionBody = body
        self._offsets = [0] * job.size
        self._parts: list[list[int]] = [[] for _ in range(job.size)]  # tokens of a character that is not complete yet
        self._counted = set[int]()  # choices whose first token was
        self._not_echoed = set(range(job.size)) if body.echo else set()

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        echo = self._echo(index) if self.body.echo else {}
        choice = super().choice(index, completion)
        if echo:
            choice["text"] = echo["text"] + choice["text"]
        if choice["logprobs"] and echo:
            choice["logprobs"] = {name: [*echo["logprobs"][name], *values] for name, values in choice["logprobs"].items()}
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.prompt_scores(index, self.body.prompt_logprobs)
        return choice

    def parts(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        if index not in self._not_echoed:
            return super().parts(index, event)
        self._not_echoed.remove(index)
        return [{"index": index, **self._echo(index), "finish_reason": None}, *super().parts(index, event)]

    def content(self, completion: Completion) -> tuple[dict[str, Any], str]:
        return {"text": completion.text}, completion.finish_reason

    def deltas(self, index: int, event: TokenEvent) -> tuple[list[dict[str, Any]], str | None]:
        return [{"text": event.text}] if event.text else [], event.finish_reason

    def logprobs(self, index: int, known: Sequence[Known]) -> dict[str, Any]:
        texts = [self.name(token) for token, _, _ in known]
        offsets = []
        for token, _, _ in known:
            offsets.append(self._offsets[index])
            self._offsets[index] += self._num_characters(index, token)
        top = [self._top(*each) for each in known]
        return {"tokens": texts, "token_logprobs": [finite(value) for _, value, _ in known], "top_logprobs": top, "text_offset": offsets}

    def _top(self, token: int, value: float, likely: Sequence[tuple[int, float]]) -> dict[str, float]:
        """By text. As with OpenAI, the token itself is among them even if it is not one of the likeliest."""
        top = {self.name(token): finite(value)}
        for other, its in likely:
            if other != token:
                text = self.name(other)
                top[f"token_id:{other}" if text in top else text] = finite(its)
        return top

    def _num_characters(self, index: int, token: int) -> int:
        """Characters that the next token adds: 0 if it is a part of one, and not its last. Some decoders drop the first one's space."""
        parts, text, is_first = [*self._parts[index], token], self.texts.of_token(token), index not in self._counted
        self._counted.add(index)
        if len(parts) > 1 or is_first or text == f"token_id:{token}":
            text = self.texts.of_tokens(parts)
            if text.endswith("\ufffd") and len(parts) < MOST_BYTES:
                self._parts[index] = parts
                return 0
        self._parts[index] = []
        return len(text)

    def _echo(self, index: int) -> dict[str, Any]:
        """The prompt of an answer, and its log-probabilities, as a part of the answer."""
        request, prompt = self.job.requests[index], self.job.prompts[index // len(self.job.answers)]
        text = None if self.body.truncate_prompt_tokens is not None else prompt.text
        text = self.texts.of_tokens(prompt.token_ids) if text is None else text
        count, logprobs = self.body.logprobs, None
        if count is not None:
            first = request.prompt_token_ids[0]
            is_added = self.texts.is_special(first) and not text.startswith(self.texts.of_token(first))
            self._offsets[index] = 0 if is_added else self._num_characters(index, first)
            rest = self.logprobs(index, self.scored(index, count))
            heads = {"tokens": self.name(first), "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
            logprobs = {name: [head, *rest[name]] for name, head in heads.items()}
        self._offsets[index], self._parts[index] = len(text), []
        self._counted.discard(index)
        return {"text": text, "logprobs": logprobs}
