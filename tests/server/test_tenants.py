"""One server for several tenants: no key learns what another's requests hold, and none takes the whole of the queue."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from paged_attn.asynchronous.job import Job, Prompt
from paged_attn.asynchronous.job_queue import WaitingJobs, fair_share
from paged_attn.engine.requests.request import Request
from tests.engine.models import make_engine, oracle, random_prompts, request_of
from tests.server.serving import Running, chat_tokenizer, held, serving, wait_for

KEYS = ("alice", "bob", "carol")
BODY: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}


def ask(running: Running, key: str, prompt: Any, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{running.url}/v1/completions", json={**BODY, "prompt": prompt, **more}, headers=headers, timeout=60.0)


def cached(running: Running, key: str, prompt: Any, **more: Any) -> int:
    tokens: int = ask(running, key, prompt, **more).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_another_key_learns_nothing_of_a_prefix() -> None:
    """The attack: a secret behind a known beginning is guessed token by token, by what the answer says was cached."""
    known, secret = random_prompts(3, 8, 8)
    with serving(api_keys=KEYS) as running:
        assert cached(running, "alice", known + secret + [5]) == 0
        assert cached(running, "alice", known + secret + [5]) == 16, "her own prefix is reused"
        guesses = [known + secret[:i] + [token] + secret[i + 1 :] + [5] for i in range(8) for token in (secret[i], 1)]
        assert {cached(running, "bob", guess) for guess in guesses[:1]} == {0}
        assert cached(running, "bob", known + secret + [6], cache_salt="alice") == 0
        assert cached(running, "alice", known + secret + [5], cache_salt="mine") == 0


def test_keys_share_prefixes_where_that_is_asked_for() -> None:
    prompt = random_prompts(4, 17)[0]
    with serving(api_keys=KEYS, share_prefixes=True) as running:
        assert [cached(running, key, prompt) for key in ("alice", "bob", "alice")] == [0, 16, 16]
        assert [cached(running, key, prompt, cache_salt="s") for key in ("alice", "bob")] == [0, 16]


def test_an_open_server_is_one_namespace() -> None:
    prompt = random_prompts(5, 17)[0]
    with serving() as running:
        assert [cached(running, key, prompt) for key in ("any", "other")] == [0, 16]


def flood(running: Running, pool: ThreadPoolExecutor, key: str, count: int) -> list[Future[httpx.Response]]:
    posts = []
    for number in range(count):
        posts.append(pool.submit(ask, running, key, [4 + number, 5], max_tokens=12))
        wait_for(lambda n=number: posts[n].done() or running.num_prompts > n)  # type: ignore[misc]
    return posts


def test_a_flood_of_one_key_leaves_room_for_the_others() -> None:
    make = functools.partial(make_engine, tokenizer=chat_tokenizer(), max_requests=2)
    with serving(make, api_keys=KEYS, max_queue=12) as running, ThreadPoolExecutor(40) as pool:
        with held(running.engine) as permits:
            many = flood(running, pool, "alice", 18)
            wait_for(lambda: sum(post.done() for post in many) == 4)
            assert all(post.result().status_code == 429 for post in many if post.done()), "2 run, 12 wait"
            permits.release(2)
            wait_for(lambda: running.metric("requests", 'state="waiting"') == 12)
            few = [pool.submit(ask, running, "bob", [50 + number, 5], max_tokens=12) for number in range(4)]
            wait_for(lambda: running.num_prompts == 18)
            permits.release(1)
            wait_for(lambda: sum(post.done() for post in many) == 8)
            turned_away = [i for i, post in enumerate(many) if post.done() and "its newest, made room" in post.result().text]
            assert turned_away == [10, 11, 12, 13], "the newest of those that waited"
            third = [pool.submit(ask, running, "carol", [70 + number, 5], max_tokens=12) for number in range(5)]
            wait_for(lambda: sum(post.done() for post in third) == 1)
            permits.release(1)
            wait_for(lambda: sum(post.done() for post in many) == 12)
        for posts, first in ((few, 50), (third, 70)):
            good = [(i, post.result()) for i, post in enumerate(posts) if post.result().status_code == 200]
            assert len(good) == 4
            assert all(reply.json()["choices"][0]["token_ids"] == oracle([first + i, 5], 12) for i, reply in good)
        assert sum(post.result().status_code == 200 for post in many) == 6
        running.wait_idle()
        assert running.metric("requests_ended_total", 'outcome="turned_away"') == 8


def test_the_keys_take_turns_however_many_salts_one_has() -> None:
    numbers: dict[int, None] = {}  # of the requests in the order in which the engine ran them: one at a time
    make = functools.partial(make_engine, tokenizer=chat_tokenizer(), max_requests=1)
    with serving(make, api_keys=KEYS) as running, ThreadPoolExecutor(20) as pool:
        engine, run = running.engine, running.engine.step_runner.run

        def noted(*args: Any) -> Any:
            numbers.update({request.prompt_token_ids[0] - 4: None for request in engine.last_scheduled})
            return run(*args)

        def one(key: str, number: int) -> None:
            assert ask(running, key, [4 + number, 5], cache_salt=f"{key}{number}").status_code == 200

        engine.step_runner.run = noted  # type: ignore[method-assign]
        with held(running.engine):
            posts = []
            for count, key in enumerate(keys := ["alice"] * 9 + ["bob"] * 3):
                posts.append(pool.submit(one, key, count))
                wait_for(lambda n=count: running.num_prompts == n + 1)  # type: ignore[misc]
        [post.result() for post in posts]
        ended = [keys[number] for number in numbers]
        assert ended.index("bob") <= 2 and [key for key in ended[:8]].count("bob") == 3, ended


@pytest.mark.parametrize("seed", range(20))
def test_who_makes_room_by_hand(seed: int) -> None:
    """Against a count of all of them: only those above their share lose, newest first, and no more than has to be."""
    rng = random.Random(seed)
    new: dict[int, bool] = {}
    jobs, waiting = [], WaitingJobs(lambda request: new[id(request)])
    for number in range(rng.randint(1, 40)):
        job = Job([Prompt([1])] * rng.randint(1, 3), [None], tenant=rng.choice("aaaaabbc"), arrived=float(number))  # type: ignore[list-item]
        job.requests = [request_of([1]) for _ in range(job.size)]
        new |= {id(request): rng.random() < 0.95 for request in job.requests}
        jobs.append(job)
        waiting.add(job)
    count = {tenant: sum(job.size for job in jobs if job.tenant == tenant) for tenant in {job.tenant for job in jobs}}
    limit = rng.randint(1, 50)
    excess = sum(count.values()) - limit
    share = fair_share(limit, count, next(iter(count)))
    gone = list(waiting.surplus(excess, limit, count))
    can_go: Callable[[Job], bool] = lambda job: all(new[id(request)] for request in job.requests)  # noqa: E731
    for tenant in count:
        mine = [job for job in jobs if job.tenant == tenant and can_go(job)]
        lost = [job for job in gone if job.tenant == tenant]
        assert lost == mine[::-1][: len(lost)], "its newest"
        before_last = count[tenant] - sum(job.size for job in lost[:-1])
        assert not lost or before_last > share
    if gone:
        assert sum(job.size for job in gone[:-1]) < excess
    assert len(waiting) == len(jobs) - len(gone)


def test_who_waits_for_too_long_is_found_in_order() -> None:
    started: set[int] = set()
    waiting = WaitingJobs(lambda request: id(request) not in started)
    jobs = [Job([Prompt([1])], [None], arrived=float(i)) for i in range(5)]  # type: ignore[list-item]
    for job in jobs:
        request: Request = request_of([1])
        job.requests = [request]
        waiting.add(job)
    started.add(id(jobs[0].requests[0]))
    started.add(id(jobs[2].requests[0]))
    assert list(waiting.overdue(13.5, 10.0)) == [jobs[1], jobs[3]] and len(waiting) == 1
    assert list(waiting.overdue(13.9, 10.0)) == []
    assert list(waiting.overdue(14.1, 10.0)) == [jobs[4]]


def test_who_is_preempted_pushes_nobody_out_of_the_queue() -> None:
    """Pages run out, and those that ran wait again beside a queue that is full."""
    make = functools.partial(make_engine, tokenizer=chat_tokenizer(), num_pages=14, prefix_cache=False, max_requests=3)
    prompts = [[4 + i, 5, 6, 7, 8, 9] for i in range(5)]
    with serving(make, max_queue=2) as running, ThreadPoolExecutor(5) as pool:
        with held(running.engine):
            posts = []
            for number, prompt in enumerate(prompts):
                posts.append(pool.submit(ask, running, "any", prompt, max_tokens=30))
                wait_for(lambda n=number: running.num_prompts == n + 1 and running.engine.has_work)  # type: ignore[misc]
        assert [post.result().json()["choices"][0]["token_ids"] for post in posts] == [oracle(prompt, 30) for prompt in prompts]
        assert running.metric("preemptions_total") > 0
