"""Who runs in a step: budgets, order, preemption, progress; no model needed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn import EngineConfig
from paged_attn.attn_ops.kv.layer_groups import LayerGroup, Retention
from paged_attn.engine.memory.grouped_kv import GroupedKVManager
from paged_attn.engine.scheduling.scheduler import Scheduler
from paged_attn.engine.scheduling.step_plan import StepPlan
from tests.engine.models import request_of
from tests.engine.scheduling.schedulers import Scheduled, arrive, collect, counts, each, launch, run, scheduler_of


def test_prompts_are_cut_into_chunks_of_the_budget() -> None:
    scheduler = scheduler_of(max_batch_tokens=8)
    arrive(scheduler, 5, 10, 4)
    steps = []
    for _ in range(4):
        scheduled = each(scheduler.schedule())
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
    scheduler.waiting.remove(long)
    run(each(scheduler.schedule()))
    scheduler.waiting.append(long)
    run(each(scheduler.schedule()))
    assert counts(each(scheduler.schedule())) == [("r1", 1, True), ("r0", 5, False)]
    assert list(scheduler.running) == [long, short], "running is in order of arrival"


def test_a_budget_below_the_number_of_decodes_serves_the_oldest() -> None:
    scheduler = scheduler_of(max_batch_tokens=2)
    arrive(scheduler, 1, 1, 1)
    run(each(scheduler.schedule()))
    scheduled = each(scheduler.schedule())
    assert counts(scheduled) == [("r0", 1, True), ("r1", 1, True)]


def test_no_more_than_max_requests_run() -> None:
    scheduler = scheduler_of(max_requests=2)
    requests = arrive(scheduler, 3, 3, 3)
    run(each(scheduler.schedule()))
    assert list(scheduler.running) == requests[:2] and list(scheduler.waiting) == requests[2:]
    scheduler.remove(requests[0], share=False)
    assert [r.id for r in (s.request for s in each(scheduler.schedule()))] == ["r1", "r2"]


def test_a_request_waits_until_its_whole_prompt_fits_and_those_behind_it_wait_too() -> None:
    scheduler = scheduler_of(num_pages=9, max_batch_tokens=8)  # 8 usable
    first, large, small = arrive(scheduler, 16, 20, 1)  # 4, 5 and 1 pages
    for _ in range(3):  # in the third there is room for a first chunk, but not for all
        run(each(scheduler.schedule()))
    assert list(scheduler.running) == [first] and list(scheduler.waiting) == [large, small]
    assert not large.pages and large.num_cached == 0
    scheduler.remove(first, share=False)
    run(each(scheduler.schedule()))
    assert list(scheduler.running) == [large]


def test_when_pages_run_out_the_newest_is_preempted_and_waits_at_its_old_place() -> None:
    scheduler = scheduler_of(num_pages=4)  # 3 usable pages of 4
    old, middle, new = arrive(scheduler, 4, 3, 3)
    late = arrive(scheduler, 2)[0]
    run(each(scheduler.schedule()))
    assert list(scheduler.running) == [old, middle, new]
    scheduled = each(scheduler.schedule())  # the oldest needs its second page
    assert [s.request for s in scheduled] == [old, middle] and scheduler.stats.preemptions == 1
    assert list(scheduler.running) == [old, middle] and list(scheduler.waiting) == [new, late]
    assert (list(new.pages), new.num_cached, len(new.tokens), new.num_sampled) == ([], 0, 4, 1), "its tokens stay"
    run(scheduled)
    scheduler.remove(old, share=False)
    scheduled = each(scheduler.schedule())
    assert [s.request for s in scheduled][:2] == [middle, new]
    assert next(s.count for s in scheduled if s.request is new) == 4, "recomputed from prompt and output"


def test_a_request_that_is_the_newest_itself_is_the_one_preempted() -> None:
    scheduler = scheduler_of(num_pages=3)
    old, new = arrive(scheduler, 3, 4)
    run(each(scheduler.schedule()))
    scheduled = each(scheduler.schedule())
    assert [s.request for s in scheduled] == [old] and list(scheduler.waiting) == [new]


def test_a_scheduled_request_that_is_preempted_later_in_the_same_step_does_not_run() -> None:
    scheduler = scheduler_of(num_pages=4, max_batch_tokens=5)  # 3 usable
    arrive(scheduler, 12)
    run(each(scheduler.schedule()))
    (new,) = arrive(scheduler, 2)
    assert scheduler.kv.reserve(new, 2)  # the last page
    scheduler.waiting.remove(new)
    scheduler.running.add(new)
    run([Scheduled(new, 2, True)])
    assert counts(each(scheduler.schedule())) == [("r0", 4, False)], "the decode came first, but the older prefill took its page"
    assert list(scheduler.waiting) == [new] and not new.pages


def test_a_prompt_that_is_preempted_half_way_is_not_shared() -> None:
    """Only logits vouch for KV: nobody knows yet whether these pages hold NaN."""
    scheduler = scheduler_of(prefix_cache=True, max_batch_tokens=8)
    (request,) = arrive(scheduler, 20)
    run(each(scheduler.schedule()))
    scheduler.preempt(request)
    assert scheduler.kv.tree is not None and scheduler.kv.tree.num_pages == 0
    assert scheduler.kv.allocator.num_free == scheduler.kv.num_usable


def test_a_request_whose_token_is_under_way_goes_on_with_it() -> None:
    scheduler = scheduler_of()
    arrive(scheduler, 5)
    launch(each(scheduler.schedule()))
    assert counts(each(scheduler.schedule(drained=False))) == [("r0", 1, True)] and not scheduler.wants_drain


def test_a_request_whose_last_token_is_under_way_runs_no_more_and_keeps_its_place() -> None:
    scheduler = scheduler_of(max_requests=2)
    last, other, third = arrive(scheduler, 3, 3, 3)
    last.max_new_tokens = 2
    launch(each(scheduler.schedule()))
    collect(last, other)
    launch(each(scheduler.schedule()))
    assert counts(each(scheduler.schedule(drained=False))) == [("r1", 1, True)]
    assert list(scheduler.running) == [last, other] and list(scheduler.waiting) == [third] and not scheduler.wants_drain
    collect(last, other)
    assert counts(each(scheduler.schedule())) == [("r1", 1, True)]


def test_nothing_is_preempted_while_a_step_is_under_way() -> None:
    scheduler = scheduler_of(num_pages=4)  # 3 usable pages of 4
    old, middle, new = arrive(scheduler, 4, 3, 3)
    (late,) = arrive(scheduler, 1)
    launch(each(scheduler.schedule()))
    scheduled = each(scheduler.schedule(drained=False))
    assert [s.request for s in scheduled] == [middle, new] and scheduler.wants_drain, "the oldest lacks a page"
    assert list(scheduler.running) == [old, middle, new] and list(scheduler.waiting) == [late] and not scheduler.stats.preemptions
    with pytest.raises(AssertionError, match="collect the step"):
        scheduler.preempt(new)
    collect(old, middle, new)
    scheduled = each(scheduler.schedule())
    assert [s.request for s in scheduled] == [old, middle] and scheduler.stats.preemptions == 1 and not scheduler.wants_drain


def test_a_waiting_request_whose_token_is_under_way_is_not_admitted_before_it_has_come() -> None:
    scheduler = scheduler_of()
    (request,) = arrive(scheduler, 3)
    request.num_tokens += 1
    assert not each(scheduler.schedule(drained=False)) and scheduler.wants_drain and list(scheduler.waiting) == [request]
    request.num_tokens -= 1
    assert counts(each(scheduler.schedule())) == [("r0", 3, True)] and not scheduler.wants_drain


@pytest.mark.parametrize("share", [True, False])
def test_remove_forgets_running_waiting_and_unknown_requests(share: bool) -> None:
    scheduler = scheduler_of(prefix_cache=True, max_requests=1)
    running, waiting = arrive(scheduler, 9, 3)
    run(each(scheduler.schedule()))
    for request in (running, waiting, running, request_of([1])):
        scheduler.remove(request, share=share)
    assert not scheduler.running and not scheduler.waiting
    assert scheduler.kv.tree is not None and scheduler.kv.tree.num_pages == (2 if share else 0)
    assert scheduler.kv.tree.locked_pages == 0


def test_cached_tokens_are_counted_at_the_first_admission_only() -> None:
    scheduler = scheduler_of(prefix_cache=True)
    first = arrive(scheduler, 0, tokens=[5] * 9)[0]
    run(each(scheduler.schedule()))
    scheduler.kv.share(first)
    second = arrive(scheduler, 0, tokens=[5] * 10)[0]
    run(each(scheduler.schedule()))
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)
    scheduler.preempt(first)
    each(scheduler.schedule())
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
        scheduled = each(scheduler.schedule())
        assert scheduled, "there is work, and nothing runs"
        chosen = [s.request for s in scheduled]
        assert len(set(chosen)) == len(chosen) <= max_requests and set(chosen) <= set(scheduler.running)
        assert 0 < sum(s.count for s in scheduled) <= budget and all(s.count > 0 for s in scheduled)
        assert all(len(s.request.pages) * page_size >= s.request.num_cached + s.count for s in scheduled)
        run(scheduled)
        for request in chosen:
            if request.num_sampled == goal[request]:
                scheduler.remove(request, share=True)
                unfinished.remove(request)
    free = scheduler.kv.allocator.num_free + (scheduler.kv.tree.num_pages if scheduler.kv.tree else 0)
    assert free == scheduler.kv.num_usable


def test_who_found_too_few_pages_is_tried_again_when_its_prefix_is_shared() -> None:
    scheduler = scheduler_of(num_pages=10, prefix_cache=True, prefix_wait_tokens=0)
    (first,) = arrive(scheduler, 0, tokens=[5] * 20)
    (second,) = arrive(scheduler, 0, tokens=[5] * 24)
    run(each(scheduler.schedule()))
    run(each(scheduler.schedule()))
    assert list(scheduler.waiting) == [second], "it needs 6 pages, and 3 are free"
    scheduler.kv.share(first)
    assert [s.request for s in each(scheduler.schedule())] == [first, second] and second.num_cached == 20


def test_who_found_too_few_pages_is_admitted_when_windows_have_moved_on() -> None:
    """Nothing is released or shared then."""
    kv = GroupedKVManager([LayerGroup((0,), Retention(4))], 14, 4, False, 40)
    scheduler = Scheduler(EngineConfig(page_size=4, max_batch_tokens=40), kv)
    first, second = arrive(scheduler, 64, 32)
    run(each(scheduler.schedule()))
    assert list(scheduler.waiting) == [second]
    for _ in range(1 + kv.page_size):
        run(each(scheduler.schedule()))
    assert list(scheduler.running) == [first, second]


def test_a_plan_gives_the_budget_back_for_what_is_dropped() -> None:
    plan, (first, second, third, decoding) = StepPlan(20), [request_of([1] * 30) for _ in range(4)]
    plan.add_decodes([decoding])
    for request in (first, second):
        request.num_cached = 4
        plan.add_chunk(request, 6)
    assert plan.budget == 7 and [(s.request, s.count) for s in each(plan.scheduled())] == [(decoding, 1), (first, 6), (second, 6)]
    plan.drop(third)
    plan.drop(second)
    plan.drop(decoding)
    assert plan.budget == 14 and [(s.request, s.count) for s in each(plan.scheduled())] == [(first, 6)]


def test_a_plan_takes_the_first_decodes_if_the_budget_has_no_room_for_all() -> None:
    plan, decodes = StepPlan(2), [request_of([1]) for _ in range(3)]
    plan.add_decodes(decodes)
    assert each(plan.scheduled()) == [Scheduled(request, 1, True) for request in decodes[:2]] and plan.budget == 0
