"""`AsyncLLM`: prompts in, completions and events out, for many coroutines over one engine."""

from __future__ import annotations

import asyncio
import atexit
import sys
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from paged_attn.asynchronous.engine_thread import EngineThread
from paged_attn.asynchronous.errors import RequestFailedError, Status
from paged_attn.asynchronous.fair_pool import FairPool
from paged_attn.asynchronous.job import Job, Prompt
from paged_attn.asynchronous.request_limit import RequestLimit
from paged_attn.asynchronous.snapshot import Observer
from paged_attn.asynchronous.stream import Stream, together
from paged_attn.asynchronous.texts import Texts, length_of
from paged_attn.chat.request import ChatRequest
from paged_attn.chat.several import CHAT_SETTINGS, ChatCompletion, ChatEvent, ChatEventReader, listed_conversations
from paged_attn.engine.engine import Engine
from paged_attn.engine.llm import LLM
from paged_attn.engine.pooling.outputs import ClassValues, EmbeddingValues, PoolingOutput, ScoreValues
from paged_attn.engine.pooling.plans import PoolingPlan, Text, classify_plan, embed_plan, score_plan
from paged_attn.engine.prompts import Loras, Params, as_list, loras_of_each, one_of
from paged_attn.engine.prompts import Prompt as GivenPrompt
from paged_attn.engine.requests.outputs import Completion, TokenEvent
from paged_attn.engine.requests.pooled_rows import PoolingKind
from paged_attn.engine.requests.request import Request
from paged_attn.engine.sampling.structured.guides import Guide
from paged_attn.engine.sampling_params import INTO_PARAMS, SamplingParams
from paged_attn.engine.setting_names import OTHER_CALL, tells_names

T = TypeVar("T")
Tell = Callable[[TokenEvent], None]
STOP_SECONDS = 10.0


class AsyncLLM:
    """`LLM` for asyncio: one engine in its own thread, whose steps all coroutines share.

    Args:
        model: and settings, as `LLM` takes them. The model is loaded before this returns.
        max_queue: requests that may wait in the engine, besides running ones; more wait in front of it, in order, at almost no cost.

    Raises:
        What `LLM` raises.

    Leaving an `async for`, cancelling the task or closing the stream ends the requests; their pages are freed after the running step.
    An error in one request ends the others of the same call, and no others. A step that raises ends the requests that were in it with a
    `StepFailedError`.

    Use it in one event loop at a time (`asyncio.run` may create a new one). Close it with `await llm.close()` or `async with`.
    """

    def __init__(self, model: nn.Module | str | Path, *, max_queue: int = 1024, **settings: Any) -> None:
        if isinstance(max_queue, bool) or not isinstance(max_queue, int) or max_queue < 0:
            raise ValueError(f"max_queue is {max_queue!r}; allowed are whole numbers from 0")
        # Its queue turns nobody away: `_limit` holds them back.
        self._prepare(lambda: LLM(model, **settings).engine, max_queue, EngineThread(self._make, sys.maxsize))
        self.thread.raises_start_failure = True
        self.thread.start()
        self.thread.wait_until_made()
        atexit.register(self.thread.stop, STOP_SECONDS)

    @classmethod
    def of_engine(cls, make_engine: Callable[[], Engine], *, max_queue: int, queue_seconds: float | None, observer: Observer) -> AsyncLLM:
        """One that has no engine before `thread.start()`, and makes it then, on its own thread. Jobs are given to `submit`.

        Args:
            max_queue, queue_seconds: see `EngineThread`, which refuses what is over the limit.
            observer: notified of steps and requests.
        """
        made = cls.__new__(cls)
        made._prepare(make_engine, max_queue, EngineThread(made._make, max_queue, observer, queue_seconds))
        return made

    def _prepare(self, make_engine: Callable[[], Engine], max_queue: int, thread: EngineThread) -> None:
        self._make_engine, self._max_queue, self.thread = make_engine, max_queue, thread
        self.texts: Texts | None = None
        self.guide_pool = FairPool("paged-attn-guides", threads=1, long_threads=1)

    def _make(self) -> Engine:
        """Called on the thread."""
        engine = self._make_engine()
        self.texts = Texts(engine.tokenizer, engine.input_processor.room)
        self._limit = RequestLimit(engine.config.max_requests + self._max_queue)
        return engine

    async def generate(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        params: Params | Sequence[Params] | None = None,
        *,
        sampling_params: Params | Sequence[Params] | None = None,
        lora: Loras = None,
        namespace: Any = None,
        priority: int = 0,
    ) -> list[Completion]:
        """Like `LLM.generate`; other coroutines run meanwhile.

        Raises:
            ValueError, TypeError, UnsupportedError: as `LLM.generate` does.
            ServingError: a step failed, or the engine was closed.
        """
        return await self._complete(prompts, one_of(params, sampling_params), lora, namespace, priority, None)

    def stream(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        params: Params | Sequence[Params] | None = None,
        *,
        sampling_params: Params | Sequence[Params] | None = None,
        lora: Loras = None,
        namespace: Any = None,
        priority: int = 0,
    ) -> Stream[TokenEvent]:
        """Like `LLM.stream`, for `async for`: a TokenEvent for every new token. Prompts are checked at the first `anext`."""
        chosen = one_of(params, sampling_params)
        return Stream(lambda tell: self._complete(prompts, chosen, lora, namespace, priority, tell))

    @tells_names("AsyncLLM.chat", INTO_PARAMS | OTHER_CALL, CHAT_SETTINGS)
    async def chat(
        self,
        messages: Sequence[Any],
        params: Params | Sequence[Params] | None = None,
        *,
        sampling_params: Params | Sequence[Params] | None = None,
        lora: Loras = None,
        namespace: Any = None,
        priority: int = 0,
        **settings: Any,
    ) -> list[ChatCompletion]:
        """Like `LLM.chat`, with the same arguments."""
        return await self._chat(messages, one_of(params, sampling_params), lora, namespace, priority, settings, None)

    @tells_names("AsyncLLM.stream_chat", INTO_PARAMS | OTHER_CALL, CHAT_SETTINGS)
    def stream_chat(
        self,
        messages: Sequence[Any],
        params: Params | Sequence[Params] | None = None,
        *,
        sampling_params: Params | Sequence[Params] | None = None,
        lora: Loras = None,
        namespace: Any = None,
        priority: int = 0,
        **settings: Any,
    ) -> Stream[ChatEvent]:
        """Like `LLM.stream_chat`, for `async for`. Messages are checked at the first `anext`."""
        chosen = one_of(params, sampling_params)
        return Stream(lambda tell: self._chat(messages, chosen, lora, namespace, priority, settings, tell))

    async def embed(
        self,
        prompts: Text | Sequence[Text],
        *,
        pooling: PoolingKind | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        namespace: Any = None,
        priority: int = 0,
    ) -> list[PoolingOutput[EmbeddingValues]]:
        """Like `LLM.embed`; other coroutines run meanwhile. Raises the same errors, and ServingError as `generate` does."""
        engine = self.thread.refuse_unless_ready()
        plan = embed_plan(engine, as_list(prompts), pooling, normalize, dimensions).cut_to(truncate_prompt_tokens)
        return await self._pool(plan, namespace, priority)

    async def classify(
        self, prompts: Text | Sequence[Text], *, truncate_prompt_tokens: int | None = None, namespace: Any = None, priority: int = 0
    ) -> list[PoolingOutput[ClassValues]]:
        """Like `LLM.classify`; raises the same errors as `embed`."""
        plan = classify_plan(self.thread.refuse_unless_ready(), as_list(prompts))
        return await self._pool(plan.cut_to(truncate_prompt_tokens), namespace, priority)

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        namespace: Any = None,
        priority: int = 0,
    ) -> list[PoolingOutput[ScoreValues]]:
        """Like `LLM.score`; raises the same errors as `embed`."""
        plan = score_plan(self.thread.refuse_unless_ready(), text_1, text_2)
        return await self._pool(plan.cut_to(truncate_prompt_tokens), namespace, priority)

    @property
    def default_params(self) -> SamplingParams:
        """Like `LLM.default_params`."""
        return self.thread.refuse_unless_ready().default_params

    def get_tokenizer(self) -> Any:
        """The model's tokenizer. Raises ValueError: there is none."""
        if self.texts is None or self.texts.tokenizer is None:
            raise ValueError("this AsyncLLM has no tokenizer; give AsyncLLM(model, tokenizer=...) one, or the path of one")
        return self.texts.tokenizer

    @property
    def closed(self) -> bool:
        """Whether requests are no longer accepted."""
        return self.thread.status in (Status.DRAINING, Status.STOPPED, Status.DEAD)

    async def close(self) -> None:
        """End running requests, free the memory of KV pages, states and graphs, and end the thread. A second call does nothing."""
        await asyncio.to_thread(self.stop, STOP_SECONDS)

    def stop(self, seconds: float) -> bool:
        """Like `close`, outside an event loop; False if the thread did not end within the given seconds, and ends with the process."""
        atexit.unregister(self.thread.stop)
        ended = self.thread.stop(seconds)
        if self.texts is not None:
            self.texts.close()
        self.guide_pool.close()
        return ended

    def __reduce__(self) -> Any:
        raise TypeError("an AsyncLLM can be neither copied nor pickled; make one in each process, of the model's path, or share this one")

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def guide(self, params: SamplingParams, client: Hashable) -> Guide | None:
        """Parse the schema or grammar of answers outside the event loop and engine, with clients in turn. Hold it until the engine has
        the request, so that it need not be parsed again.

        Raises:
            ValueError, UnsupportedError: it cannot be parsed.
        """
        if params.guide is None:
            return None
        guides = self.thread.refuse_unless_ready().input_processor.guides
        return await self.guide_pool.run(client, lambda: guides.prototype(params))

    def submit(self, job: Job) -> None:
        """Queue a job; its updates go to the running event loop. Raises the same errors as `EngineThread.submit`."""
        job.loop = asyncio.get_running_loop()
        self.thread.submit(job)

    def _ready(self) -> tuple[Engine, Texts]:
        """Raises NotServingError while there are none."""
        engine = self.thread.refuse_unless_ready()
        assert self.texts is not None
        return engine, self.texts

    async def _complete(self, prompts: Any, params: Any, lora: Loras, namespace: Any, priority: int, tell: Tell | None) -> list[Completion]:
        engine, texts, client = *self._ready(), object()
        listed = as_list(prompts)
        taken = engine.input_processor.params_of_each(params, len(listed), tell is not None)
        loras = loras_of_each(lora, len(listed))

        async def one(index: int) -> list[Completion]:
            (prompt,) = await texts.prompts([listed[index]], client, cut=engine.input_processor.cut(taken[index]))
            return await self._run(prompt, taken[index], index, loras[index], namespace, priority, tell)

        return await self._all(one, [each.n for each in taken], "prompt")

    async def _chat(
        self,
        messages: Any,
        params: Any,
        lora: Loras,
        namespace: Any,
        priority: int,
        settings: Mapping[str, Any],
        tell: Callable[[ChatEvent], None] | None,
    ) -> list[ChatCompletion]:
        engine, texts, client = *self._ready(), object()
        conversations = listed_conversations(messages)
        taken = engine.input_processor.params_of_each(params, len(conversations), tell is not None)
        loras = loras_of_each(lora, len(conversations))
        requests = [ChatRequest(conversation, **settings) for conversation in conversations]

        async def one(index: int) -> list[ChatCompletion]:
            length, cut = length_of(conversations[index]), engine.input_processor.cut(taken[index])
            prompt = await texts.chat(lambda: requests[index], length, taken[index].guide, client, cut)
            assert prompt.form is not None
            form, reader = prompt.form, ChatEventReader({index: prompt.form})

            def told(event: TokenEvent) -> None:
                for each in reader.feed(event):
                    tell(each)  # type: ignore[misc]

            params = form.enforced(taken[index])
            found = await self._run(prompt, params, index, loras[index], namespace, priority, None if tell is None else told)
            return [ChatCompletion.read(completion, form) for completion in found]

        return await self._all(one, [each.n for each in taken], "conversation")

    async def _pool(self, plan: PoolingPlan, namespace: Any, priority: int) -> list[PoolingOutput[Any]]:
        engine, texts, client = *self._ready(), object()
        cut = engine.input_processor.cut(plan.params)

        async def one(index: int) -> list[Request]:
            given = [plan.prompts[index]]
            (prompt,) = await (texts.pairs(given, client, cut=cut) if plan.pairs else texts.prompts(given, client, cut=cut))
            return await self._ended(Job([prompt], [plan.params], namespace, priority=priority, text_at_end=True))

        requests = await self._all(one, [1] * len(plan.prompts), "prompt")
        return await asyncio.to_thread(plan.read, requests)

    async def _run(
        self, prompt: Prompt, params: SamplingParams, index: int, lora: str | None, namespace: Any, priority: int, tell: Tell | None
    ) -> list[Completion]:
        """All answers to one prompt; with `tell`, which takes each event, without their completions' text before the end."""
        guide = await self.guide(params, object())
        job = Job([prompt], params.answers(), namespace, priority=priority, text_at_end=tell is None, guide=guide, lora=lora)

        def told(answer: int, event: TokenEvent) -> None:
            if tell is not None:
                event.index, event.answer = index, answer
                tell(event)

        requests = await self._ended(job, told)
        for answer, request in enumerate(requests):
            request.index, request.answer = index, answer
        return [request.completion() for request in requests]

    async def _ended(self, job: Job, tell: Callable[[int, TokenEvent], None] = lambda *_: None) -> list[Request]:
        """The job's requests when all have ended; whatever happens, nothing of it runs any more."""
        self.submit(job)
        try:
            await job.accepted()
            async for batch in job.batches():
                for answer, event in batch:
                    tell(answer, event)
        except RequestFailedError as error:
            assert error.__cause__ is not None
            raise error.__cause__ from None
        finally:
            self.thread.cancel(job)
        return job.requests

    async def _all(self, one: Callable[[int], Coroutine[Any, Any, list[T]]], num_answers: Sequence[int], what: str) -> list[T]:
        """The answers to prompts, so many to each, in their order; they begin as the limit lets them."""
        count = len(num_answers)

        async def limited(index: int) -> list[T]:
            try:
                async with self._limit.taken(num_answers[index]):
                    return await one(index)
            except (ValueError, TypeError) as error:
                if count > 1:
                    error.add_note(f"({what} {index + 1} of {count})")
                raise

        found = await together([limited(index) for index in range(count)]) if count != 1 else [await limited(0)]
        return [answer for answers in found for answer in answers]
