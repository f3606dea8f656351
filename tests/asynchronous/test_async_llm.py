"""`AsyncLLM`: the tokens of the unmodified model, shared steps, and nothing left of whoever leaves, errs or is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from paged_attn import AsyncLLM, EngineConfig, SamplingParams
from paged_attn.asynchronous.errors import NotServingError, StepFailedError
from paged_attn.asynchronous.request_limit import RequestLimit
from paged_attn.asynchronous.stream import together
from paged_attn.attn_ops.errors import ContextError
from tests.engine.models import (
    OVERLAP,
    POISON,
    assert_idle,
    fail_once,
    make_llm,
    one_capture,
    oracle,
    poisoned,
    random_prompts,
    tiny,
    tokenizer,
)
from tests.server.serving import held

PROMPTS = random_prompts(11, 6, 19, 11)
GREEDY = SamplingParams(max_new_tokens=12)
LONG = SamplingParams(max_new_tokens=100)


def make(max_queue: int = 1024, **settings: Any) -> AsyncLLM:
    config = EngineConfig(**{"page_size": 4, "num_pages": 128, "overlap": OVERLAP, **settings})
    with one_capture():
        return AsyncLLM(tiny(), tokenizer=tokenizer(), config=config, max_queue=max_queue)


def run(work: Callable[[AsyncLLM], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """`work` with an AsyncLLM, of which nothing may be left afterwards."""

    async def whole() -> None:
        async with make(**settings) as llm:
            await work(llm)
            await idle(llm)
            assert llm._limit.free == llm._limit.count
        assert llm.closed and not llm.thread._thread.is_alive()
        assert llm.thread.engine is not None and llm.thread.engine.kv.allocator.num_free == llm.thread.engine.kv.num_usable

    asyncio.run(whole())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def idle(llm: AsyncLLM) -> None:
    """Until nothing is under way."""
    engine = llm.thread.engine
    assert engine is not None
    # Both are read by the thread before it waits: whoever is in neither is done with.
    thread = llm.thread
    await until(lambda: not (thread._owners or thread._queue or thread._cancels or engine.has_work or thread._failed_steps.probe_due))
    assert_idle(engine)


def steps_of(llm: AsyncLLM) -> int:
    assert llm.thread.engine is not None
    return llm.thread.engine.stats.steps


def test_completions_are_the_models_in_the_order_of_the_prompts() -> None:
    async def work(llm: AsyncLLM) -> None:
        done = await llm.generate([*PROMPTS, "some text"], GREEDY)
        assert [each.token_ids for each in done] == [oracle(prompt) for prompt in PROMPTS] + [oracle(tokenizer()("some text").input_ids)]
        assert [each.index for each in done] == [0, 1, 2, 3] and done[3].prompt == "some text"
        (alone,) = await llm.generate({"prompt_token_ids": PROMPTS[0]}, sampling_params=GREEDY)
        assert alone.token_ids == oracle(PROMPTS[0]) and alone.finish_reason == "length"

    run(work)


def test_several_answers_and_params_for_each_prompt_are_those_of_llm() -> None:
    params = [SamplingParams(max_new_tokens=5, temperature=1.0, seed=3, n=3), SamplingParams(max_new_tokens=7)]
    want = make_llm(tokenizer=tokenizer()).generate(PROMPTS[:2], params)

    async def work(llm: AsyncLLM) -> None:
        got = await llm.generate(PROMPTS[:2], params)
        assert [(c.index, c.answer, c.token_ids, c.text) for c in got] == [(c.index, c.answer, c.token_ids, c.text) for c in want]

    run(work)


def test_a_stream_brings_every_token_once_with_its_index() -> None:
    async def work(llm: AsyncLLM) -> None:
        events = [event async for event in llm.stream([*PROMPTS, "some text"], GREEDY)]
        for i, prompt in enumerate([*PROMPTS, tokenizer()("some text").input_ids]):
            mine = [event for event in events if event.index == i]
            assert [event.token_id for event in mine] == oracle(prompt)
            assert [event.finish_reason for event in mine] == [None] * 11 + ["length"]
        (whole,) = await llm.generate("some text", GREEDY)
        assert "".join(event.text for event in events if event.index == 3) == whole.text

    run(work)


def test_many_coroutines_share_steps() -> None:
    async def work(llm: AsyncLLM) -> None:
        engine = llm.thread.engine
        assert engine is not None
        prompts = random_prompts(4, *[7] * 8)
        with held(engine) as permits:
            tasks = [asyncio.create_task(llm.generate(prompt, GREEDY)) for prompt in prompts]
            await until(lambda: len(llm.thread._owners) + len(llm.thread._queue) == 8)
            permits.release(10**6)
            done = await asyncio.gather(*tasks)
        assert [each.token_ids for (each,) in done] == [oracle(prompt) for prompt in prompts]
        assert steps_of(llm) < 40, "8 x 12 tokens, one after the other, would be 96"

    run(work)


def leaving(kind: str) -> Callable[[AsyncLLM], Coroutine[Any, Any, None]]:
    async def first_of(llm: AsyncLLM, and_then: Callable[[], Any] = lambda: None) -> None:
        async for event in llm.stream(PROMPTS, LONG):
            assert event.token_id is not None
            if kind in ("break", "return"):
                return
            if kind == "raise":
                raise KeyError("mine")
            and_then()

    async def work(llm: AsyncLLM) -> None:
        if kind == "return":
            await first_of(llm)
        elif kind == "break":
            async for _ in llm.stream(PROMPTS, LONG):
                break
        elif kind == "raise":
            with pytest.raises(KeyError):
                await first_of(llm)
        elif kind == "aclose":
            stream = llm.stream(PROMPTS, LONG)
            await anext(stream)
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        elif kind == "async with":
            async with llm.stream(PROMPTS, LONG) as stream:
                await anext(stream)
        elif kind in ("task", "timeout"):
            begun = asyncio.Event()
            task = asyncio.create_task(first_of(llm, begun.set))
            if kind == "task":
                await begun.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await task

    return work


@pytest.mark.parametrize("kind", ["break", "return", "raise", "aclose", "async with", "task", "timeout"])
def test_who_leaves_a_stream_ends_its_requests(kind: str) -> None:
    async def work(llm: AsyncLLM) -> None:
        engine = llm.thread.engine
        assert engine is not None
        await leaving(kind)(llm)
        await idle(llm)
        assert engine.stats.new_tokens < 3 * 100, "they would have been all"

    run(work)


def test_pages_are_free_after_the_step_that_runs() -> None:
    async def work(llm: AsyncLLM) -> None:
        engine = llm.thread.engine
        assert engine is not None
        with held(engine) as permits:
            permits.release(1 + OVERLAP)
            async for _ in llm.stream(PROMPTS[0], LONG):
                break
            await until(lambda: bool(llm.thread._cancels) or not engine.has_work)
            before = engine.stats.new_tokens
            permits.release(1)
            await idle(llm)
            assert engine.stats.new_tokens <= before + 2 and engine.kv.num_available == engine.kv.num_usable

    run(work)


def test_a_cancelled_generate_ends_its_requests() -> None:
    async def work(llm: AsyncLLM) -> None:
        task = asyncio.create_task(llm.generate(PROMPTS, LONG))
        await until(lambda: steps_of(llm) > 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(llm)
        assert llm.thread.engine is not None and llm.thread.engine.stats.new_tokens < 300

    run(work)


def test_a_stream_that_nobody_reads_does_nothing() -> None:
    async def work(llm: AsyncLLM) -> None:
        stream = llm.stream(PROMPTS[0], LONG)
        await asyncio.sleep(0.01)
        assert steps_of(llm) == 0
        del stream
        gc.collect()

    run(work)


def test_an_error_of_one_call_harms_no_other() -> None:
    async def work(llm: AsyncLLM) -> None:
        good = asyncio.create_task(llm.generate(PROMPTS, GREEDY))
        with pytest.raises(ValueError, match="token id") as told:
            await llm.generate([PROMPTS[0], [5, 10**6]], LONG)
        assert "(prompt 2 of 2)" in told.value.__notes__
        with pytest.raises(ValueError, match="2 SamplingParams for 1 prompts"):
            await llm.generate(PROMPTS[0], [GREEDY, GREEDY])
        with pytest.raises(TypeError, match="prompts is a int"):
            await llm.generate(5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="prompt_logprobs is 1 in a stream"):
            await anext(llm.stream(PROMPTS[0], SamplingParams(prompt_logprobs=1)))
        with pytest.raises(ValueError, match="regex"):
            await llm.generate(PROMPTS[0], SamplingParams(regex="("))
        assert [each.token_ids for each in await good] == [oracle(prompt) for prompt in PROMPTS]

    run(work)


def test_logits_that_are_not_finite_raise_what_llm_raises() -> None:
    async def work(llm: AsyncLLM) -> None:
        with poisoned():
            bad = asyncio.create_task(llm.generate([4, POISON, 5], GREEDY))
            (good,) = await llm.generate(PROMPTS[0], GREEDY)
            with pytest.raises(ValueError, match="finite"):
                await bad
            with pytest.raises(ValueError, match="finite"):
                [event async for event in llm.stream([4, POISON, 5], GREEDY)]
        assert good.token_ids == oracle(PROMPTS[0])

    run(work)


def test_a_step_that_raises_ends_its_requests_and_the_next_ones_run() -> None:
    async def work(llm: AsyncLLM) -> None:
        assert llm.thread.engine is not None
        fail_once(llm.thread.engine, RuntimeError("the kernel failed"), at_call=3)
        with pytest.raises(StepFailedError, match="the kernel failed"):
            await llm.generate(PROMPTS[0], GREEDY)
        (done,) = await llm.generate(PROMPTS[1], GREEDY)
        assert done.token_ids == oracle(PROMPTS[1])

    run(work)


def test_more_than_fit_wait_and_all_are_answered() -> None:
    prompts = random_prompts(8, *[5, 9] * 20)

    async def work(llm: AsyncLLM) -> None:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(llm.thread._owners) + len(llm.thread._queue))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        done = await llm.generate(prompts, SamplingParams(max_new_tokens=3))
        watching.cancel()
        assert [each.token_ids for each in done] == [oracle(prompt, 3) for prompt in prompts]
        # Those of the step that ended them, and those who took their places.
        assert 0 < most <= 10
        with pytest.raises(ValueError, match="n is 6; at most 5 answers"):
            await llm.generate(PROMPTS[0], SamplingParams(n=6))

    run(work, max_queue=3, max_requests=2)


def test_room_is_given_in_order_and_come_back() -> None:
    async def whole() -> None:
        limit, order = RequestLimit(3), list[str]()

        async def take(name: str, count: int, gate: asyncio.Event) -> None:
            async with limit.taken(count):
                order.append(name)
                await gate.wait()

        gate = asyncio.Event()
        tasks = [asyncio.create_task(take(name, count, gate)) for name, count in (("a", 2), ("b", 3), ("c", 1))]
        await asyncio.sleep(0)
        assert order == ["a"], "c does not go before b"
        tasks[1].cancel()
        await asyncio.sleep(0.001)
        assert order == ["a", "c"]
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert limit.free == 3 and not limit._waiting

    asyncio.run(whole())


def test_the_first_error_ends_what_runs_beside_it() -> None:
    async def whole() -> None:
        ended = []

        async def long() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        async def bad() -> None:
            await asyncio.sleep(0)
            raise KeyError("mine")

        with pytest.raises(KeyError):
            await together([long(), bad(), long()])
        assert ended == [True, True]

    asyncio.run(whole())


def test_one_llm_serves_one_event_loop_after_the_other_and_others_go_on_meanwhile() -> None:
    llm = make()
    try:
        for prompt in PROMPTS:
            (done,) = asyncio.run(llm.generate(prompt, GREEDY))
            assert done.token_ids == oracle(prompt)

        async def abandoned() -> None:
            stream = llm.stream(PROMPTS[0], LONG)
            await anext(stream)

        asyncio.run(abandoned())
        asyncio.run(idle(llm))
    finally:
        assert llm.stop(20)


def test_after_close_it_says_so_and_what_ran_has_ended() -> None:
    async def whole() -> None:
        llm = make()
        reading = asyncio.create_task(first(llm.stream(PROMPTS[0], LONG)))
        event, stream = await reading
        assert event.token_id == oracle(PROMPTS[0])[0]
        await llm.close()
        with pytest.raises(NotServingError, match="closed before the request was complete"):
            while True:
                await anext(stream)
        with pytest.raises(NotServingError, match="the engine has shut down"):
            await llm.generate(PROMPTS[0])
        await llm.close()

    asyncio.run(whole())


@pytest.mark.parametrize("running", [False, True])
def test_close_gives_back_the_memory_of_pages_and_the_engine_refuses_what_comes_later(running: bool) -> None:
    async def whole() -> None:
        llm = make()
        engine = llm.thread.engine
        assert engine is not None
        storage = engine.pool.storage.untyped_storage()
        assert storage.nbytes() > 0
        if running:
            await first(llm.stream(PROMPTS[0], LONG))
        else:
            await llm.generate(PROMPTS[0], GREEDY)
        for _ in range(2):
            await llm.close()
            assert storage.nbytes() == 0 and not engine.has_work
        with pytest.raises(ContextError, match="this LLM was closed"):
            engine.add_request(PROMPTS[0])

    asyncio.run(whole())


async def first(stream: Any) -> tuple[Any, AsyncIterator[Any]]:
    return await anext(stream), stream


def test_what_llm_refuses_is_refused_at_once_and_no_thread_is_left() -> None:
    before = threading.active_count()
    for settings, message in (({"page_sise": 4}, "page_sise"), ({"max_queue": -1}, "max_queue is -1"), ({"page_size": 0}, "page_size")):
        with pytest.raises((ValueError, TypeError), match=message):
            AsyncLLM(tiny(), **settings)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model is a int"):
        AsyncLLM(5)  # type: ignore[arg-type]
    with contextlib.suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(until(lambda: threading.active_count() <= before), 5))
    assert threading.active_count() <= before
