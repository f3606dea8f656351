"""Answers of /v1/completions: the text, the prompt if it is echoed, and log-probabilities of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_attn.asynchronous.job import Job
from paged_attn.asynchronous.texts import Texts
from paged_attn.engine.requests.outputs import Completion, TokenEvent
from paged_attn.server.api.bodies import Body, CompletionBody
from paged_attn.server.api.replies import Known, Reply, finite

MOST_BYTES = 4  # in one character, so at most this many tokens


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
