"""Long work of many clients: each has its turn, in its own order, and nobody works for those who have left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from paged_attn.asynchronous.errors import NotServingError, PromptError
from paged_attn.asynchronous.fair_pool import FairPool
from paged_attn.asynchronous.texts import SHORT, THREADS, Texts
from tests.engine.models import make_engine
from tests.server.serving import PATIENCE, Running, chat_tokenizer, held, serving, wait_for


def test_a_second_loop_that_runs_is_told_so_and_one_after_the_other_is_not() -> None:
    pool, begun, end = FairPool("two loops", 2, 1), threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert end.wait(20)
        return "done"

    with ThreadPoolExecutor(1) as others:
        first = others.submit(asyncio.run, pool.run("a", work))
        assert begun.wait(20)
        with pytest.raises(RuntimeError, match="for one event loop at a time"):
            asyncio.run(pool.run("b", work))
        end.set()
        assert first.result() == "done"
    assert asyncio.run(pool.run("b", work)) == "done"
    pool.close()


class Work:
    """Pieces that say when they begin, and wait until they may end."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def piece(self, name: str) -> Callable[[], str]:
        gate = self._gates.setdefault(name, threading.Event())

        def run() -> str:
            self.begun.append(name)
            assert gate.wait(20)
            return name

        return run

    async def end(self, *names: str) -> None:
        for name in names:
            self._gates[name].set()
        await asyncio.sleep(0.05)

    def end_all(self) -> None:
        for gate in self._gates.values():
            gate.set()


def run(test: Callable[[FairPool, Work], Awaitable[None]], threads: int = 2, long_threads: int = 1) -> None:
    async def with_pool() -> None:
        pool, work = FairPool("test", threads, long_threads), Work()
        try:
            await test(pool, work)
        finally:
            work.end_all()
            pool.close()

    asyncio.run(with_pool())


def test_clients_take_turns_and_keep_their_own_order() -> None:
    async def test(pool: FairPool, work: Work) -> None:
        names = ["a1", "a2", "a3", "b1", "c1", "b2"]
        done = [asyncio.create_task(pool.run(name[0], work.piece(name))) for name in names]
        await asyncio.sleep(0.05)
        assert work.begun == ["a1"]
        for name in ("a1", "b1", "c1", "a2", "b2", "a3"):
            assert work.begun[-1] == name
            await work.end(name)
        assert await asyncio.gather(*done) == names
        assert not pool._waiting and not pool._busy and pool._free == 1

    run(test, threads=1)


def test_one_client_has_one_thread_and_the_others_the_rest() -> None:
    async def test(pool: FairPool, work: Work) -> None:
        done = [asyncio.create_task(pool.run(name[0], work.piece(name))) for name in ("a1", "a2", "b1", "c1")]
        await asyncio.sleep(0.05)
        assert work.begun == ["a1", "b1"], "its second piece waits for its first"
        await work.end("a1")
        assert work.begun == ["a1", "b1", "c1"]
        await work.end("b1", "c1", "a2")
        await asyncio.gather(*done)

    run(test)


def test_long_work_leaves_a_thread_for_short_work() -> None:
    async def test(pool: FairPool, work: Work) -> None:
        long = [asyncio.create_task(pool.run(name, work.piece(name), is_long=True)) for name in ("A", "B")]
        short = [asyncio.create_task(pool.run(name, work.piece(name))) for name in ("c", "d")]
        await asyncio.sleep(0.05)
        assert work.begun == ["A", "c"]
        await work.end("c")
        assert work.begun == ["A", "c", "d"]
        await work.end("A")
        assert work.begun == ["A", "c", "d", "B"]
        await work.end("B", "d")
        await asyncio.gather(*long, *short)

    run(test)


def test_work_of_those_who_left_is_dropped() -> None:
    async def test(pool: FairPool, work: Work) -> None:
        tasks = {name: asyncio.create_task(pool.run(name[0], work.piece(name))) for name in ("a1", "a2", "a3", "b1")}
        await asyncio.sleep(0.05)
        for name in ("a1", "a2", "b1"):
            tasks[name].cancel()
        await asyncio.sleep(0.05)
        assert [piece.is_long for piece in pool._waiting["a"]] == [False], "nothing is held for them"
        await work.end("a1")
        assert work.begun == ["a1", "a3"]
        await work.end("a3")
        assert await tasks["a3"] == "a3" and not pool._waiting and pool._free == 1

    run(test, threads=1)


def test_what_work_raises_is_raised_and_the_thread_works_on() -> None:
    async def test(pool: FairPool, work: Work) -> None:
        with pytest.raises(ZeroDivisionError):
            await pool.run("a", lambda: 1 // 0)
        assert await pool.run("a", lambda: 5) == 5

    run(test)


class SlowTokenizer:
    """Prompts that hold SLOW are tokenized once the gate is open; `begun` are all that were taken up."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gate = threading.Event()


@pytest.fixture
def slow_tokenizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowTokenizer]:
    tokenizer, prompt = SlowTokenizer(), Texts._prompt

    def slow(self: Texts, own: Any, given: Any, *settings: Any) -> Any:
        tokenizer.begun.append(str(given)[:20])
        if "SLOW" in str(given):
            assert tokenizer.gate.wait(PATIENCE)
        return prompt(self, own, given, *settings)

    monkeypatch.setattr(Texts, "_prompt", slow)
    yield tokenizer
    tokenizer.gate.set()


def ask(running: Running, prompt: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"prompt": prompt, "max_tokens": 1}
    return httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE).status_code


def test_a_short_prompt_does_not_wait_for_the_long_ones_of_others(slow_tokenizer: SlowTokenizer) -> None:
    """A client with several long prompts, and one with four bytes."""
    # Positions for prompts that count as long.
    with serving(lambda: make_engine(tokenizer=chat_tokenizer()), api_keys=("k1", "k2")) as running, ThreadPoolExecutor(4) as pool:
        texts = running.server.state.llm.texts
        assert texts is not None
        texts.room = texts.max_characters = 10 * SHORT
        long = [pool.submit(ask, running, "SLOW" + "x" * SHORT, "k1") for _ in range(3)]
        wait_for(lambda: len(slow_tokenizer.begun) == 1)
        assert ask(running, "four", "k2") == 200 and len(slow_tokenizer.begun) == 2
        slow_tokenizer.gate.set()
        assert [each.result() for each in long] == [400] * 3, "they are longer than the model's positions"


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_clients_who_left_are_not_tokenized(slow_tokenizer: SlowTokenizer, stream: bool) -> None:
    with serving() as running, ThreadPoolExecutor(8) as pool:

        def leave(number: int) -> None:
            body = {"prompt": f"SLOW {number}", "max_tokens": 2, "stream": stream}
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"{running.url}/v1/completions", json=body, timeout=0.5)

        list(pool.map(leave, range(8)))
        wait_for(lambda: len(running.server.state.calls) <= THREADS)
        slow_tokenizer.gate.set()
        assert ask(running, "four", "none") == 200 and len(slow_tokenizer.begun) <= THREADS + 1, slow_tokenizer.begun
        assert running.engine.stats.prompt_tokens == 4, "nothing of them ran"
        wait_for(lambda: len(running.server.state.calls) == 0)


def test_far_too_long_a_prompt_is_seen_by_its_length_or_its_beginning() -> None:
    seen: list[int] = []
    own = chat_tokenizer()

    class Counting:
        def __call__(self, text: str, **settings: Any) -> Any:
            seen.append(len(text))
            return own(text, **settings)

    texts = Texts(own, room=1000)
    for _ in range(THREADS):
        texts._copies.get()
        texts._copies.put(Counting())
    assert texts.max_characters == 1000 * len("<pad>")
    with pytest.raises(PromptError, match="too long: 5,001 characters; 1,000 tokens, for which there is room, are 5,000 at most"):
        asyncio.run(texts.prompts(["x" * 5001], "a"))
    assert seen == []
    (prompt,) = asyncio.run(texts.prompts(["x" * 4000], "a"))
    assert len(prompt.token_ids) == 4000, "the engine says by how much it is too long"
    texts.max_characters = 10**9
    with pytest.raises(PromptError, match="too long: 7984 tokens > 1000, for which there is room, and it may have more; shorten it"):
        asyncio.run(texts.prompts(["x" * 10**6], "a"))
    assert seen == [4000, 8000]
    texts.close()


def test_a_client_who_leaves_while_the_engine_is_held_up_leaves_nothing() -> None:
    with serving() as running, held(running.engine) as permits:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 50}, timeout=0.5)
        wait_for(lambda: len(running.server.state.calls) == 0)
        permits.release(100)


def test_work_that_a_loop_left_does_not_take_the_thread_of_the_next_one() -> None:
    pool, work = FairPool("test", 1, 1), Work()

    async def left() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.run("a", work.piece("first")), 0.05)

    async def next_one() -> str:
        return await asyncio.wait_for(pool.run("a", work.piece("second")), 20)

    asyncio.run(left())
    work.end_all()
    wait_for(lambda: bool(pool._done))  # nobody was left to settle it
    work.piece("second")
    work.end_all()
    assert asyncio.run(next_one()) == "second" and pool._free == 1 and not pool._busy
    pool.close()


def test_who_waits_when_the_pool_is_closed_is_told() -> None:
    async def test(pool: FairPool, work: Work) -> None:
        calls = [asyncio.ensure_future(pool.run(client, work.piece(client))) for client in "abc"]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(pool.close)
        async with asyncio.timeout(20):
            for call in calls[1:]:
                with pytest.raises(NotServingError):
                    await call
            await work.end("a")
            assert await calls[0] == "a"
            with pytest.raises(NotServingError):
                await pool.run("d", work.piece("d"))
        assert work.begun == ["a"]

    run(test, threads=1)
