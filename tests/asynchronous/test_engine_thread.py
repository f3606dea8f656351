"""The engine's thread tells everyone who waits, whatever ends it; and who has left makes room at once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, NoReturn

import pytest

from paged_attn import SamplingParams
from paged_attn.asynchronous.engine_thread import EngineThread
from paged_attn.asynchronous.errors import EngineDiedError, NotServingError, QueueFullError
from paged_attn.asynchronous.job import Job, Prompt
from tests.asynchronous.test_async_llm import make, until
from tests.engine.models import make_llm

SHORT = SamplingParams(max_new_tokens=4)


def no_memory(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("no memory")


def test_all_that_a_turn_took_are_told_when_it_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        llm = make()
        async with asyncio.timeout(20):
            await llm.generate([1, 2], SHORT)
            assert llm.thread.engine is not None
            monkeypatch.setattr(llm.thread.engine, "add_request", no_memory)
            ended = await asyncio.gather(*(llm.generate([1, 2, index], SHORT) for index in range(3)), return_exceptions=True)
            assert any(isinstance(error, EngineDiedError) for error in ended)
            assert all(isinstance(error, (EngineDiedError, NotServingError)) for error in ended)  # the latter: who came afterwards
            await llm.close()

    asyncio.run(work())


def test_who_asked_is_told_what_the_question_raised_and_the_engine_goes_on() -> None:
    async def work() -> None:
        async with make() as llm, asyncio.timeout(20):
            with pytest.raises(RuntimeError, match="no memory"):
                await llm.thread.ask(no_memory)
            assert len((await llm.generate([1, 2], SHORT))[0].token_ids) == 4

    asyncio.run(work())


def test_who_left_in_the_same_turn_leaves_room_for_who_came() -> None:
    engine = make_llm(max_requests=1, num_pages=128).engine
    thread, gate, entered, step = EngineThread(lambda: engine, 4), threading.Event(), threading.Event(), engine.step

    def waiting() -> Any:
        entered.set()
        assert gate.wait(20)
        return step()

    engine.step = waiting  # type: ignore[method-assign]
    gate.set()
    thread.start()
    thread.wait_until_made()

    async def work() -> None:
        loop = asyncio.get_running_loop()

        def submitted(tenant: str, new: int) -> Job:
            job = Job([Prompt([5, 6, 7])], [SamplingParams(max_new_tokens=new, ignore_eos=True)], tenant=tenant)
            job.loop = loop
            thread.submit(job)
            return job

        async def in_a_step() -> None:
            """It has begun, and does not end."""
            gate.clear()
            entered.clear()
            await asyncio.to_thread(entered.wait, 20)

        await submitted("X", 100).accepted()
        four = [submitted("X", 20) for _ in range(4)]
        for job in four:
            await job.accepted()
        await in_a_step()
        thread.cancel(four[0])
        other = submitted("Y", 20)
        gate.set()
        await other.accepted()
        await in_a_step()
        told = [update for job in four[1:] for update in iter_updates(job)]
        gate.set()
        assert not [update for update in told if isinstance(update, QueueFullError)] and thread.snapshot.waiting == 4

    def iter_updates(job: Job) -> list[Any]:
        return list(job._updates)

    try:
        asyncio.run(asyncio.wait_for(work(), 30))
    finally:
        gate.set()
        assert thread.stop(20)


def test_who_waited_and_left_keeps_nobody_out_of_an_idle_engine() -> None:
    engine = make_llm(max_requests=1, num_pages=128).engine
    thread = EngineThread(lambda: engine, 1)
    thread.start()
    thread.wait_until_made()

    async def work() -> None:
        def submitted(prompts: int, new: int) -> Job:
            job = Job([Prompt([5, 6, 7])] * prompts, [SamplingParams(max_new_tokens=new, ignore_eos=True)])
            job.loop = asyncio.get_running_loop()
            thread.submit(job)
            return job

        first = [submitted(1, 200) for _ in range(2)]
        await until(lambda: thread._queue.blocked)
        with thread._condition:  # both in one turn
            for job in first:
                thread.cancel(job)
        await until(lambda: not (thread._cancels or thread.snapshot.running or thread.snapshot.waiting))
        both = submitted(2, 3)
        await both.accepted()
        assert [request.num_sampled for request in await both.finished()] == [3, 3]

    try:
        asyncio.run(asyncio.wait_for(work(), 30))
    finally:
        assert thread.stop(20)
