"""A job: the prompts of one call, as the event loop sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from paged_attn.asynchronous.errors import RequestFailedError
from paged_attn.chat.answers.answer_form import AnswerForm
from paged_attn.engine.requests.outputs import TokenEvent
from paged_attn.engine.requests.pooled_rows import PoolingParams
from paged_attn.engine.requests.request import Request
from paged_attn.engine.sampling.structured.guides import Guide, GuideError
from paged_attn.engine.sampling_params import SamplingParams

Params = SamplingParams | PoolingParams
MOST_EVENTS = 256  # in a batch: telling a client of so many takes some 10 ms of the event loop, and more with log-probabilities


@dataclass(frozen=True)
class Prompt:
    """Token ids, the text that they came from, if any, how answers to a chat are read, and of a pair of texts which one a token is of."""

    token_ids: Sequence[int]
    text: str | None = None
    form: AnswerForm | None = None
    token_types: Sequence[int] | None = None

    def params(self, params: Params) -> Params:
        """The params of the request that it becomes."""
        if self.token_types is None or not isinstance(params, PoolingParams):
            return params
        return replace(params, token_types=self.token_types)

    @property
    def kept_tokens(self) -> frozenset[int]:
        """Special tokens that stay in the text of answers."""
        return frozenset() if self.form is None else self.form.kept


@dataclass(frozen=True)
class Accepted:
    """The engine has taken all prompts."""


Event = tuple[int, TokenEvent]  # which of the job's requests
Update = Accepted | Exception | Event  # an error ends the job


@dataclass(eq=False)
class Job:
    """Prompts, and for each the answers wanted: a request of the engine for each of those, in order.

    The engine's thread fills `requests` and sends updates; all else belongs to the event loop.

    Args:
        answers: the params of each answer to a prompt.
        namespace, tenant, priority: as `Engine.add_request` takes them.
        text_at_end: only the last event of each request comes, and the text is read when it has ended.
        guide: what the answers follow, held so that the engine need not read it again.
        arrived: when the call came, by `time.perf_counter`.
        lora: the adapter that the prompts are for.

    Attributes:
        requests: one per answer, those to the first prompt first, from acceptance on; to be read once a request has finished.
        cancelled: the engine must not start it, or must stop it.
        failure: what its events ended with.
        loop: that its updates come to; None: nobody listens.
        first_token_at: when the first token of any request came.
    """

    prompts: Sequence[Prompt]
    answers: Sequence[Params]
    namespace: Hashable = None
    _: KW_ONLY
    tenant: Hashable = None
    priority: int = 0
    text_at_end: bool = False
    guide: Guide | None = None
    arrived: float = field(default_factory=time.perf_counter)
    lora: str | None = None
    requests: list[Request] = field(default_factory=list, init=False)
    cancelled: bool = field(default=False, init=False)
    first_token_at: float | None = field(default=None, init=False)
    failure: Exception | None = field(default=None, init=False)
    loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _updates: list[Update] = field(default_factory=list, init=False)
    _waiting: asyncio.Future[None] | None = field(default=None, init=False)

    @property
    def size(self) -> int:
        """How many requests it is."""
        return len(self.prompts) * len(self.answers)

    def usage(self, new: int | None = None) -> dict[str, Any]:
        """OpenAI's counts of tokens. A prompt counts once, however many answers it got. `new`: how many new tokens there are so far; None:
        all that came."""
        new = sum(request.num_sampled for request in self.requests) if new is None else new
        prompts = self.requests[:: len(self.answers)]
        prompt, cached = sum(len(request.prompt_token_ids) for request in prompts), sum(request.cached_tokens for request in prompts)
        details = {"cached_tokens": cached}
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new, "prompt_tokens_details": details}

    def receive(self, update: Update) -> None:
        """Called on the event loop."""
        self._updates.append(update)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def accepted(self) -> None:
        """Wait until the engine has looked at all prompts. Raises ValueError, TypeError: it refused one; then none of them runs;
        ServingError: it is not running any more, or others were more urgent."""
        await self._any()
        update = self._updates.pop(0)
        if isinstance(update, Exception):
            raise self._failed(update)
        assert isinstance(update, Accepted), update

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Pairs (number of the request, event): all that have come since the last batch, at most MOST_EVENTS, until all requests have
        finished. A reader that falls behind gets more at once; between its batches others have the event loop.

        Raises:
            ServingError: a request failed, after the events before that; the others of the job are then to be cancelled.
        """
        left = self.size
        while left:
            await self._any()
            updates, self._updates = self._updates, []
            for start in range(0, len(updates), MOST_EVENTS):
                if start:
                    await asyncio.sleep(0)
                events, error = list[Event](), None
                for update in updates[start : start + MOST_EVENTS]:
                    if not isinstance(update, tuple) or update[1].finish_reason == "error":
                        error = self._error_of(update)
                        break
                    events.append(update)
                    left -= update[1].finish_reason is not None
                    if not left:
                        break
                if events:
                    yield events
                if error is not None:
                    raise self._failed(error) from error.__cause__
                if not left:
                    return

    def _error_of(self, update: Update) -> Exception:
        """What ends the job, as an update says."""
        if isinstance(update, Exception):
            return update
        assert isinstance(update, tuple), update
        error = self.requests[update[0]].error
        # What the client asked for may be at fault, though it shows only now.
        failed = RequestFailedError(str(error), "guide_failed" if isinstance(error, GuideError) else "bad_logits")
        failed.__cause__ = error
        return failed

    async def _any(self) -> None:
        """Wait until an update is there."""
        while not self._updates:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting

    def _failed(self, error: Exception) -> Exception:
        self.failure = error
        return error

    async def finished(self) -> list[Request]:
        """The requests when all have ended; raises as `batches` does."""
        async for _ in self.batches():
            pass
        return self.requests
