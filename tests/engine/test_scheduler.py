"""Who runs in a step: budgets, order, preemption, progress; no model needed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn import EngineConfig
from paged_attn.engine.kv_manager import KVManager
from paged_attn.engine.request import Request
from paged_attn.engine.sampler import SampledToken
from paged_attn.engine.scheduler import Scheduled, Scheduler
from tests.engine.models import request_of


def scheduler_of(num_pages: int = 100, page_size: int = 4, prefix_cache: bool = False, **config: int) -> Scheduler:
    return Scheduler(EngineConfig(page_size=page_size, **config), KVManager(num_pages, page_size, prefix_cache))


def arrive(scheduler: Scheduler, *lengths: int, tokens: list[int] | None = None) -> list[Request]:
    requests = []
    for length in lengths:
        request = request_of(tokens or [1 + length % 7] * length)
        request.arrival = len(scheduler.waiting) + len(scheduler.running)
        request.id = f"r{request.arrival}"
        scheduler.waiting.append(request)
        requests.append(request)
    return requests


def run(scheduled: list[Scheduled]) -> None:
    """What the engine does after a step; no request ends by itself."""
    for s in scheduled:
        samples = s.samples
        s.request.num_cached += s.count
        if samples:
            s.request.tokens.append(9)
            s.request.sampled.append(SampledToken(9, None, None))


def counts(scheduled: list[Scheduled]) -> list[tuple[str, int, bool]]:
    return [(s.request.id, s.count, s.samples) for s in scheduled]


def test_prompts_are_cut_into_chunks_of_the_budget() -> None:
    scheduler = scheduler_of(max_batch_tokens=8)
    arrive(scheduler, 5, 10, 4)
    steps = []
    for _ in range(4):
        scheduled = scheduler.schedule()
        steps.append(counts(scheduled))
        run(scheduled)
    assert steps == [
        [("r0", 5, True), ("r1", 3, False)],
        [("r0", 1, True), ("r1", 7, True)],
        [("r0", 1, True), ("r1", 1, True), ("r2", 4, True)],
        [("r0", 1, True), ("r1", 1, True), ("r2", 1, True)],
    ]


def test_decodes_go_before_older_prefills() -> None:
    scheduler = scheduler_of(max_batch_tokens=6)
    long, short = arrive(scheduler, 20, 2)
    scheduler.waiting.reverse()  # the short one is admitted first, yet is the younger
    run(scheduler.schedule())
    assert counts(scheduler.schedule()) == [("r1", 1, True), ("r0", 5, False)]
    assert scheduler.running == [long, short], "running is in order of arrival"


def test_a_budget_below_the_number_of_decodes_serves_the_oldest() -> None:
    scheduler = scheduler_of(max_batch_tokens=2)
    arrive(scheduler, 1, 1, 1)
    run(scheduler.schedule())
    scheduled = scheduler.schedule()
    assert counts(scheduled) == [("r0", 1, True), ("r1", 1, True)]


def test_no_more_than_max_requests_run() -> None:
    scheduler = scheduler_of(max_requests=2)
    requests = arrive(scheduler, 3, 3, 3)
    run(scheduler.schedule())
    assert scheduler.running == requests[:2] and list(scheduler.waiting) == requests[2:]
    scheduler.remove(requests[0], share=False)
    assert [r.id for r in (s.request for s in scheduler.schedule())] == ["r1", "r2"]


def test_a_request_waits_until_its_whole_prompt_fits_and_those_behind_it_wait_too() -> None:
    scheduler = scheduler_of(num_pages=9, max_batch_tokens=8)  # 8 usable
    first, large, small = arrive(scheduler, 16, 20, 1)  # 4, 5 and 1 pages
    for _ in range(3):  # in the third there is room for a first chunk, but not for all
        run(scheduler.schedule())
    assert scheduler.running == [first] and list(scheduler.waiting) == [large, small]
    assert not large.pages and large.num_cached == 0
    scheduler.remove(first, share=False)
    run(scheduler.schedule())
    assert scheduler.running == [large]


def test_when_pages_run_out_the_newest_is_preempted_and_waits_at_its_old_place() -> None:
    scheduler = scheduler_of(num_pages=4)  # 3 usable pages of 4
    old, middle, new = arrive(scheduler, 4, 3, 3)
    late = arrive(scheduler, 2)[0]
    run(scheduler.schedule())
    assert scheduler.running == [old, middle, new]
    scheduled = scheduler.schedule()  # the oldest needs its second page
    assert [s.request for s in scheduled] == [old, middle] and scheduler.num_preemptions == 1
    assert scheduler.running == [old, middle] and list(scheduler.waiting) == [new, late]
    assert (new.pages, new.num_cached, len(new.tokens), len(new.sampled)) == ([], 0, 4, 1), "its tokens stay"
    run(scheduled)
    scheduler.remove(old, share=False)
    scheduled = scheduler.schedule()
    assert [s.request for s in scheduled][:2] == [middle, new]
    assert next(s.count for s in scheduled if s.request is new) == 4, "recomputed from prompt and output"


def test_a_request_that_is_the_newest_itself_is_the_one_preempted() -> None:
    scheduler = scheduler_of(num_pages=3)
    old, new = arrive(scheduler, 3, 4)
    run(scheduler.schedule())
    scheduled = scheduler.schedule()
    assert [s.request for s in scheduled] == [old] and list(scheduler.waiting) == [new]


def test_a_scheduled_request_that_is_preempted_later_in_the_same_step_does_not_run() -> None:
    scheduler = scheduler_of(num_pages=4, max_batch_tokens=5)  # 3 usable
    arrive(scheduler, 12)
    run(scheduler.schedule())
    (new,) = arrive(scheduler, 2)
    assert scheduler.kv.reserve(new, 2)  # the last page
    scheduler.waiting.clear()
    scheduler.running.append(new)
    run([Scheduled(new, 2)])
    assert counts(scheduler.schedule()) == [("r0", 4, False)], "the decode came first, but the older prefill took its page"
    assert list(scheduler.waiting) == [new] and not new.pages


def test_a_prompt_that_is_preempted_half_way_is_not_shared() -> None:
    """Only logits vouch for KV: nobody knows yet whether these pages hold NaN."""
    scheduler = scheduler_of(prefix_cache=True, max_batch_tokens=8)
    (request,) = arrive(scheduler, 20)
    run(scheduler.schedule())
    scheduler.preempt(request)
    assert scheduler.kv.tree is not None and scheduler.kv.tree.num_pages == 0
    assert scheduler.kv.allocator.num_free == scheduler.kv.num_usable


@pytest.mark.parametrize("share", [True, False])
def test_remove_forgets_running_waiting_and_unknown_requests(share: bool) -> None:
    scheduler = scheduler_of(prefix_cache=True, max_requests=1)
    running, waiting = arrive(scheduler, 9, 3)
    run(scheduler.schedule())
    for request in (running, waiting, running, request_of([1])):
        scheduler.remove(request, share=share)
    assert not scheduler.running and not scheduler.waiting
    assert scheduler.kv.tree is not None and scheduler.kv.tree.num_pages == (2 if share else 0)
    assert scheduler.kv.tree.locked_pages == 0


def test_cached_tokens_are_counted_at_the_first_admission_only() -> None:
    scheduler = scheduler_of(prefix_cache=True)
    first = arrive(scheduler, 0, tokens=[5] * 9)[0]
    run(scheduler.schedule())
    scheduler.kv.share(first)
    second = arrive(scheduler, 0, tokens=[5] * 10)[0]
    run(scheduler.schedule())
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)
    scheduler.preempt(first)
    scheduler.schedule()
    assert (first.num_cached, first.cached_tokens) == (8, 0)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6), num_pages=st.integers(5, 14), budget=st.integers(1, 12), max_requests=st.integers(1, 5),
    page_size=st.sampled_from([1, 2, 4]), prefix_cache=st.booleans(),
)  # fmt: skip
def test_every_request_ends_whatever_the_sizes(
    seed: int, num_pages: int, budget: int, max_requests: int, page_size: int, prefix_cache: bool
) -> None:
    rng = random.Random(seed)
    scheduler = scheduler_of(num_pages, page_size, prefix_cache, max_batch_tokens=budget, max_requests=max_requests)
    room = (num_pages - 1) * page_size
    requests = [arrive(scheduler, 0, tokens=rng.choices([1, 2], k=rng.randint(1, room)))[0] for _ in range(6)]
    goal = {r: rng.randint(1, room - len(r.tokens) + 1) for r in requests}
    for arrival, request in enumerate(requests):
        request.arrival = arrival
    unfinished, steps = set(requests), 0
    while unfinished:
        steps += 1
        assert steps < 3000, "no progress"
        scheduled = scheduler.schedule()
        assert scheduled, "there is work, and nothing runs"
        chosen = [s.request for s in scheduled]
        assert len(set(chosen)) == len(chosen) <= max_requests and set(chosen) <= set(scheduler.running)
        assert 0 < sum(s.count for s in scheduled) <= budget and all(s.count > 0 for s in scheduled)
        assert all(len(s.request.pages) * page_size >= s.request.num_cached + s.count for s in scheduled)
        run(scheduled)
        for request in chosen:
            if len(request.sampled) == goal[request]:
                scheduler.remove(request, share=True)
                unfinished.remove(request)
    free = scheduler.kv.allocator.num_free + (scheduler.kv.tree.num_pages if scheduler.kv.tree else 0)
    assert free == scheduler.kv.num_usable
