"""A job hands on what has come: all of it at once to a reader that is late, and no more than somebody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from paged_attn import SamplingParams
from paged_attn.asynchronous.errors import QueueFullError, RequestFailedError
from paged_attn.asynchronous.job import MOST_EVENTS, Accepted, Job, Prompt, Update
from paged_attn.engine.requests.outputs import TokenEvent
from tests.asynchronous.test_async_llm import make


def made(answers: int = 1) -> Job:
    return Job([Prompt([1, 2])], [SamplingParams()] * answers)


def token(number: int, finish_reason: str | None = None) -> TokenEvent:
    return TokenEvent("r", number, str(number), finish_reason)


async def read(job: Job, *updates: Update) -> list[list[int | None]]:
    """The tokens of each batch, when all updates were there before the first was read."""
    for update in updates:
        job.receive(update)
    return [[event.token_id for _, event in batch] async for batch in job.batches()]


def test_a_late_reader_gets_all_that_has_come_at_once() -> None:
    assert asyncio.run(read(made(), (0, token(1)), (0, token(2)), (0, token(3, "length")))) == [[1, 2, 3]]


def test_a_reader_that_waits_gets_each_event_as_it_comes() -> None:
    async def work() -> list[list[int | None]]:
        job = made(answers=2)
        batches: list[list[int | None]] = []

        async def reading() -> None:
            async for batch in job.batches():
                batches.append([event.token_id for _, event in batch])

        task = asyncio.ensure_future(reading())
        for update in ((0, token(1)), (1, token(2, "stop")), (0, token(3, "length"))):
            await asyncio.sleep(0)
            job.receive(update)
            await asyncio.sleep(0)
        await asyncio.wait_for(task, 5)
        return batches

    assert asyncio.run(work()) == [[1], [2], [3]]


def test_a_reader_that_is_very_late_leaves_turns_to_others() -> None:
    """Telling its client of all at once would take seconds of the event loop."""

    async def work() -> None:
        job, turns, seen = made(), list[int](), list[int | None]()
        for number in range(3 * MOST_EVENTS):
            job.receive((0, token(number)))
        job.receive((0, token(-1, "stop")))

        async def other() -> None:
            while True:
                turns.append(len(seen))
                await asyncio.sleep(0)

        beside = asyncio.ensure_future(other())
        async for batch in job.batches():
            seen += [event.token_id for _, event in batch]
        beside.cancel()
        assert seen == [*range(3 * MOST_EVENTS), -1] and turns == [MOST_EVENTS, 2 * MOST_EVENTS, 3 * MOST_EVENTS]

    asyncio.run(work())


@pytest.mark.parametrize("late", [1, MOST_EVENTS])
def test_what_comes_after_the_end_ends_nothing(late: int) -> None:
    """Such as a deadline that passes while the client reads the end."""
    tokens = [(0, token(number)) for number in range(late)]
    updates = [*tokens, (0, token(-1, "stop")), QueueFullError("full")]
    assert [each for batch in asyncio.run(read(made(), *updates)) for each in batch] == [*range(late), -1]


@pytest.mark.parametrize(
    ("failed", "error"), [(lambda: QueueFullError("full"), QueueFullError), (lambda: (0, token(3, "error")), RequestFailedError)]
)
def test_what_came_before_an_error_is_handed_on_first(failed: Callable[[], Any], error: type[Exception]) -> None:
    async def work() -> None:
        job, seen = made(), list[int | None]()
        job.requests.append(type("Failed", (), {"error": FloatingPointError("not finite")})())  # type: ignore[arg-type]
        for update in ((0, token(1)), (0, token(2)), failed(), (0, token(4))):
            job.receive(update)
        with pytest.raises(error):
            async for batch in job.batches():
                seen += [event.token_id for _, event in batch]
        assert seen == [1, 2] and isinstance(job.failure, error)

    asyncio.run(work())


def test_the_acceptance_and_the_first_tokens_may_have_come_together() -> None:
    async def work() -> None:
        job = made()
        for update in (Accepted(), (0, token(1)), (0, token(2, "stop"))):
            job.receive(update)
        await job.accepted()
        assert [event.token_id async for batch in job.batches() for _, event in batch] == [1, 2]

    asyncio.run(work())


@pytest.mark.parametrize(("text_at_end", "updates"), [(True, 2), (False, 7)])
def test_of_an_answer_that_is_read_at_its_end_only_the_last_event_comes(text_at_end: bool, updates: int) -> None:
    """Each would wake up the event loop, which has the GIL meanwhile."""

    async def work() -> None:
        came = list[Update]()

        class Counting(Job):
            def receive(self, update: Update) -> None:
                came.append(update)
                super().receive(update)

        async with make() as llm:
            job = Counting([Prompt([5, 6, 7])], [SamplingParams(max_new_tokens=6, ignore_eos=True)], text_at_end=text_at_end)
            llm.submit(job)
            await job.accepted()
            (request,) = await job.finished()
            assert len(request.completion().token_ids) == 6 and len(came) == updates

    asyncio.run(asyncio.wait_for(work(), 30))
