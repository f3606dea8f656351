"""Who is admitted before whom, and who is preempted for whom: priorities, namespaces in turn, policies, and what a long queue costs."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.engine.requests.request import Request
from paged_attn.engine.scheduling.queue_policy import ArrivalOrder, LongestPrefixFirst
from paged_attn.engine.scheduling.scheduler import HELD_PER_STEP, Scheduler
from paged_attn.engine.scheduling.waiting_queue import WaitingQueue
from tests.engine.models import request_of
from tests.engine.scheduling.schedulers import arrive, collect, counts, each, launch, run, scheduler_of


def admissions(scheduler: Scheduler, limit: int = 10**6) -> list[Request]:
    """Each waiting request in the order of admission, one a step; who runs ends after its step. Needs max_requests=1."""
    order: list[Request] = []
    while scheduler.waiting and len(order) < limit:
        run(each(scheduler.schedule()))
        for request in list(scheduler.running):
            order.append(request)
            scheduler.remove(request, share=True)
    return order


def test_the_lower_priority_value_goes_first_and_equals_by_arrival() -> None:
    scheduler = scheduler_of(max_requests=1)
    late, first, urgent, second = (arrive(scheduler, 3, priority=p)[0] for p in (7, 0, -3, 0))
    assert admissions(scheduler) == [urgent, first, second, late]


def test_pages_are_taken_from_the_least_urgent_then_the_newest() -> None:
    scheduler = scheduler_of(num_pages=5)  # 4 usable pages of 4
    old, urgent, idle, new = (arrive(scheduler, 3, priority=p)[0] for p in (0, -1, 5, 0))
    run(each(scheduler.schedule()))
    assert list(scheduler.running) == [urgent, old, new, idle]
    run(each(scheduler.schedule()))
    assert list(scheduler.running) == [urgent, old, new, idle]
    scheduled = each(scheduler.schedule())  # three need their second page
    assert [s.request for s in scheduled] == [urgent, old] and scheduler.stats.preemptions == 2
    assert list(scheduler.waiting) == [new, idle]


def test_a_more_urgent_request_takes_the_place_of_a_less_urgent_one() -> None:
    scheduler = scheduler_of(max_requests=2)
    first, second = arrive(scheduler, 3, 3, priority=1)
    run(each(scheduler.schedule()))
    equal, urgent = arrive(scheduler, 2, priority=1)[0], arrive(scheduler, 2, priority=0)[0]
    scheduled = each(scheduler.schedule())
    assert [s.request for s in scheduled] == [first, urgent] and scheduler.stats.preemptions == 1
    assert list(scheduler.waiting) == [second, equal], "equals do not push each other out"
    run(scheduled)
    scheduler.remove(urgent, share=False)
    assert [s.request for s in each(scheduler.schedule())] == [first, second], "who ran before goes first"


def test_pages_of_less_urgent_ones_are_taken_for_an_urgent_one_only_if_they_suffice() -> None:
    scheduler = scheduler_of(num_pages=9)  # 8 usable pages of 4
    equal, idle, idler = (arrive(scheduler, 6, priority=p)[0] for p in (0, 1, 2))  # 2 pages each, and 2 are free
    run(each(scheduler.schedule()))
    (huge,) = arrive(scheduler, 28)  # 7 pages: not even with those of both
    for _ in range(2):
        each(scheduler.schedule())
    assert scheduler.stats.preemptions == 0 and list(scheduler.waiting) == [huge]
    scheduler.remove(huge, share=False)
    (large,) = arrive(scheduler, 12)  # 3 pages: with those of the least urgent
    each(scheduler.schedule(drained=False))
    assert scheduler.wants_drain and scheduler.stats.preemptions == 0
    scheduled = each(scheduler.schedule())
    assert [s.request for s in scheduled] == [equal, idle, large]
    assert list(scheduler.running) == [equal, large, idle] and list(scheduler.waiting) == [idler]


def test_an_urgent_request_does_not_wait_for_the_long_prompt_of_a_less_urgent_one() -> None:
    scheduler = scheduler_of(max_batch_tokens=8)
    (long,) = arrive(scheduler, 100, priority=1)
    run(each(scheduler.schedule()))
    equal, urgent = arrive(scheduler, 5, priority=1)[0], arrive(scheduler, 5, priority=0)[0]
    assert counts(each(scheduler.schedule())) == [(urgent.id, 5, True), (long.id, 3, False)]
    assert equal in scheduler.waiting


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_one_tenants_flood_does_not_hold_up_another(policy: str) -> None:
    scheduler = scheduler_of(max_requests=1, policy=policy, prefix_cache=True)
    flood = [arrive(scheduler, 3, namespace="flood")[0] for _ in range(50)]
    others = [arrive(scheduler, 3, namespace=name)[0] for name in ("a", "b", "a")]
    order = admissions(scheduler, 8)
    assert order == [flood[0], others[0], others[1], flood[1], others[2], flood[2], flood[3], flood[4]]


def test_many_namespaces_give_a_tenant_no_more_turns() -> None:
    scheduler = scheduler_of(max_requests=1)
    flood = [arrive(scheduler, 3, namespace=("salt", i % 5), tenant="flood")[0] for i in range(50)]
    others = [arrive(scheduler, 3, namespace=name, tenant="other")[0] for name in ("a", "b", "a")]
    order = admissions(scheduler, 8)
    assert order == [flood[0], others[0], flood[1], others[1], flood[2], others[2], flood[3], flood[4]]
    assert scheduler.waiting.count_of == {"flood": 45}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.integers(0, 10**6))
def test_between_two_turns_of_a_namespace_each_other_has_at_most_one(names: list[str], seed: int) -> None:
    """So a namespace with its first request waiting is served within as many admissions as there are namespaces."""
    rng = random.Random(seed)
    scheduler = scheduler_of(max_requests=1)
    requests = [arrive(scheduler, 2, namespace=name)[0] for name in names]
    order = []
    waiting_since: Counter[str] = Counter()
    while scheduler.waiting:
        present = {r.namespace for r in scheduler.waiting}
        (served,) = admissions(scheduler, 1)
        order.append(served)
        for name in present:
            waiting_since[name] = 0 if name == served.namespace else waiting_since[name] + 1
            assert waiting_since[name] < 3
        if rng.random() < 0.1 and scheduler.waiting:
            scheduler.remove(rng.choice(list(scheduler.waiting)), share=False)
    for name in set(names):
        mine = [r for r in order if r.namespace == name]
        assert mine == [r for r in requests if r in mine], "within a namespace by arrival"


def cached(scheduler: Scheduler, tokens: list[int], namespace: Any = None) -> None:
    """These tokens were computed and shared once."""
    (request,) = arrive(scheduler, 0, tokens=tokens, namespace=namespace)
    assert admissions(scheduler) == [request]


def test_the_longest_cached_prefix_goes_first_under_lpm_and_not_under_fcfs() -> None:
    for policy in ("lpm", "fcfs"):
        scheduler = scheduler_of(max_requests=1, policy=policy, prefix_cache=True)
        cached(scheduler, [5] * 9)
        cached(scheduler, [6] * 21)
        none, short, long, none_either = (arrive(scheduler, 0, tokens=t)[0] for t in ([7] * 30, [5] * 12, [6] * 18, [8] * 30))
        expected = [long, short, none, none_either] if policy == "lpm" else [none, short, long, none_either]
        assert admissions(scheduler) == expected


def test_lpm_goes_by_what_is_cached_now() -> None:
    scheduler = scheduler_of(max_requests=1, policy="lpm", prefix_cache=True)
    stranger, first, second = (arrive(scheduler, 0, tokens=t)[0] for t in ([7] * 9, [5] * 9, [5] * 10))
    other = arrive(scheduler, 0, tokens=[7] * 10)[0]
    assert admissions(scheduler) == [stranger, other, first, second]


def test_lpm_passes_over_the_first_only_so_often() -> None:
    scheduler = scheduler_of(max_requests=1, policy="lpm", prefix_cache=True)
    cached(scheduler, [5] * 9)
    unlucky = [arrive(scheduler, 0, tokens=[7 + i] * 3)[0] for i in range(2)]
    for _ in range(400):
        arrive(scheduler, 0, tokens=[5] * 10)
    order = admissions(scheduler)
    assert [order.index(request) for request in unlucky] == [LongestPrefixFirst.PATIENCE, 2 * LongestPrefixFirst.PATIENCE + 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_no_place_in_an_lpm_line_waits_longer_than_its_bound(seed: int) -> None:
    rng = random.Random(seed)
    with mock.patch.multiple(LongestPrefixFirst, WINDOW=rng.randint(1, 6), PATIENCE=rng.randint(0, 4), LOOKUPS=rng.randint(1, 3)):
        scheduler = scheduler_of(max_requests=1, policy="lpm", prefix_cache=True)
        cached(scheduler, [5] * 30)
        deadline: dict[Request, int] = {}
        for turn in range(60):
            for _ in range(rng.choice([0, 1, 3])):
                place = len(scheduler.waiting)
                (request,) = arrive(scheduler, 0, tokens=[rng.choice([5, 6])] * rng.randint(1, 30))
                deadline[request] = turn + (LongestPrefixFirst.PATIENCE + 1) * (place + 1)
            for request in admissions(scheduler, 1):
                assert turn < deadline.pop(request)
        assert all(turn < last for last in deadline.values())


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_without_cached_prefixes_an_lpm_line_goes_by_arrival(seed: int) -> None:
    """Also when requests come back that arrived before those in the window."""
    rng = random.Random(seed)
    with mock.patch.multiple(LongestPrefixFirst, WINDOW=rng.randint(1, 4), LOOKUPS=rng.randint(1, 3)):
        line, waiting = LongestPrefixFirst(scheduler_of(prefix_cache=True).kv), []
        for arrival in rng.sample(range(60), 60):
            request = request_of([5] * 9)
            request.arrival = arrival
            line.push(request)
            waiting = sorted([*waiting, request], key=lambda r: r.arrival)
            while waiting and rng.random() < 0.4:
                gone = waiting[0] if rng.random() < 0.5 else rng.choice(waiting)
                assert line.next() is waiting[0]
                line.remove(gone, had_turn=gone is waiting[0])
                waiting.remove(gone)
                assert (
                    len(line) == len(waiting) and len(line._window) <= LongestPrefixFirst.WINDOW and set(line._cached) <= set(line._window)
                )


def test_an_lpm_line_looks_again_when_pages_were_shared_and_only_then() -> None:
    kv = scheduler_of(prefix_cache=True).kv
    line = LongestPrefixFirst(kv)
    requests = [request_of([first] * 9) for first in (7, 5, *range(10, 50))]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
        line.push(request)
    with mock.patch.object(kv, "cached_tokens", wraps=kv.cached_tokens) as lookups:
        assert line.next() is line.next() is requests[0] and lookups.call_count == LongestPrefixFirst.LOOKUPS
        computed = request_of([5] * 9)
        kv.adopt_prefix(computed)
        assert kv.reserve(computed, 9)
        computed.num_cached = computed.num_validated = 9
        kv.release(computed, share=True)
        for _ in range(4):  # in which all of the line are looked up
            kv.version += 1
            line.next()
        assert line.next() is requests[1] and lookups.call_count == 5 * LongestPrefixFirst.LOOKUPS


def test_preempted_requests_come_back_before_new_ones_of_every_namespace() -> None:
    scheduler = scheduler_of(max_requests=2)
    first, second = arrive(scheduler, 3, 3, namespace="a")
    run(each(scheduler.schedule()))
    arrive(scheduler, 3, namespace="b")
    for request in (first, second):
        scheduler.preempt(request)
    assert [s.request for s in each(scheduler.schedule())] == [first, second]


class ByHand:
    """What a WaitingQueue of ArrivalLines should do, in the simplest words."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.preempted: list[Request] = []
        self.aside: list[Request] = []
        self.tenants: dict[int, list[Any]] = {}  # by priority, whose turn it is first
        self.turns: dict[Any, list[Any]] = {}  # namespaces, by priority and tenant
        self.ran: set[Request] = set()

    def next(self) -> Request | None:
        if not self.waiting and not self.preempted:
            return None
        urgency = min(r.priority for r in (*self.waiting, *self.preempted))
        if ran := [r for r in self.preempted if r.priority == urgency]:
            return min(ran, key=lambda r: r.arrival)
        mine = [r for r in self.waiting if r.priority == urgency]
        tenant = next(name for name in self.tenants[urgency] if any(r.tenant == name for r in mine))
        mine = [r for r in mine if r.tenant == tenant]
        namespace = next(name for name in self.turns[urgency, tenant] if any(r.namespace == name for r in mine))
        return min((r for r in mine if r.namespace == namespace), key=lambda r: r.arrival)

    def enter(self, request: Request, ran: bool) -> None:
        if ran:
            self.ran.add(request)
        if request in self.ran:
            self.preempted.append(request)
            return
        same = [r for r in self.waiting if (r.priority, r.tenant) == (request.priority, request.tenant)]
        for turns, name, is_new in (
            (self.tenants.setdefault(request.priority, []), request.tenant, not same),
            (
                self.turns.setdefault((request.priority, request.tenant), []),
                request.namespace,
                not any(r.namespace == request.namespace for r in same),
            ),
        ):
            if is_new:
                turns[:] = [each for each in turns if each != name] + [name]
        self.waiting.append(request)

    def had_turn(self, request: Request) -> None:
        if request in self.preempted:
            self.preempted.remove(request)
        else:
            self.waiting.remove(request)
            tenants, turns = self.tenants[request.priority], self.turns[request.priority, request.tenant]
            tenants.append(tenants.pop(tenants.index(request.tenant)))
            turns.append(turns.pop(turns.index(request.namespace)))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_the_queue_does_what_one_would_do_by_hand(seed: int) -> None:
    rng, queue, model = random.Random(seed), WaitingQueue(ArrivalOrder), ByHand()
    for arrival in range(rng.randint(1, 200)):
        action = rng.choice(["append", "append", "append_preempted", "take", "set_aside", "bring_back", "remove"])
        everyone = [*model.waiting, *model.preempted, *model.aside]
        if action.startswith("append"):
            request = request_of([1], rng.choice("ab"))
            request.tenant = rng.choice("xyz")
            request.arrival, request.priority = arrival if action == "append" else rng.randrange(10**6), rng.choice([0, 1])
            queue.append(request, ran_before=action == "append_preempted")
            model.enter(request, ran=action == "append_preempted")
        elif action == "bring_back" and model.aside:
            request = rng.choice(model.aside)
            queue.bring_back(request)
            model.aside.remove(request)
            model.enter(request, ran=False)
        elif action == "remove" and everyone:
            request = rng.choice(everyone)
            queue.remove(request)
            for place in (model.waiting, model.preempted, model.aside):
                if request in place:
                    place.remove(request)
        elif action in ("take", "set_aside") and (next_one := model.next()) is not None:
            waited = getattr(queue, action)(next_one)
            assert action == "set_aside" or (waited is None) == (next_one in model.preempted)
            model.had_turn(next_one)
            if action == "set_aside":
                model.aside.append(next_one)
        everyone = [*model.waiting, *model.preempted, *model.aside]
        assert queue.next() is model.next() and len(queue) == len(everyone) and all(r in queue for r in everyone)
        assert list(queue) == sorted(everyone, key=lambda r: (r.priority, r.arrival))
        assert queue.count_of == Counter(r.tenant for r in everyone)
        assert all(queue.is_new(r) == (r not in model.ran) for r in everyone)
        assert queue.urgency == (model.next().priority if model.next() else None)  # type: ignore[union-attr]


def test_who_left_an_arrival_line_does_not_stay_in_memory() -> None:
    line = ArrivalOrder()
    requests = [request_of([1]) for _ in range(2000)]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
        line.push(request)
    for request in requests[1:]:
        line.remove(request)
    assert len(line) == 1 and len(line._heap) < 100 and line.next() is requests[0]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("full", ["places", "pages"])
def test_ten_thousand_waiting_requests_are_not_looked_at_while_nothing_changes(policy: str, full: str) -> None:
    limits = {"max_requests": 4} if full == "places" else {"num_pages": 14}
    scheduler = scheduler_of(policy=policy, prefix_cache=True, **limits)
    for _ in range(10_000):
        arrive_fast(scheduler, [1 + len(scheduler.waiting) % 7] * 8)
    run(each(scheduler.schedule()))
    run(each(scheduler.schedule()))
    kv = scheduler.kv
    with (
        mock.patch.object(kv, "adopt_prefix", side_effect=AssertionError("looked")),
        mock.patch.object(kv, "cached_tokens", side_effect=AssertionError("looked")),
        mock.patch.object(WaitingQueue, "__iter__", side_effect=AssertionError("looked")),
    ):
        for _ in range(3):
            run(each(scheduler.schedule()))
    assert len(scheduler.waiting) >= 9_990


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_step_that_admits_looks_at_few_of_ten_thousand(policy: str) -> None:
    scheduler = scheduler_of(policy=policy, prefix_cache=True, max_requests=4, num_pages=1000, prefix_wait_tokens=4)
    for _ in range(10_000):
        arrive_fast(scheduler, [5] * 40)  # all of them share a prefix that nobody has computed
    kv = scheduler.kv
    with (
        mock.patch.object(kv, "adopt_prefix", wraps=kv.adopt_prefix) as adopt,
        mock.patch.object(kv, "cached_tokens", wraps=kv.cached_tokens) as lookups,
    ):
        each(scheduler.schedule())
    assert adopt.call_count <= HELD_PER_STEP + 4 and lookups.call_count <= (HELD_PER_STEP + 4) * LongestPrefixFirst.LOOKUPS


def arrive_fast(scheduler: Scheduler, tokens: list[int]) -> None:
    request = request_of(tokens)
    request.arrival, request.max_new_tokens = len(scheduler.waiting), 1000
    scheduler.waiting.append(request)


def test_statistics_count_each_request_once() -> None:
    scheduler = scheduler_of(prefix_cache=True, max_requests=2, prefix_wait_tokens=0)
    stats = scheduler.stats
    assert stats.hit_rate == 0
    first, second, third = (arrive(scheduler, 0, tokens=[5] * n)[0] for n in (9, 10, 11))
    scheduled = each(scheduler.schedule())
    launch(scheduled)
    collect(first, second)
    scheduler.kv.share(first)
    scheduler.remove(first, share=True)
    run(each(scheduler.schedule()))
    assert (stats.admitted, stats.prompt_tokens, stats.prompt_tokens_cached) == (3, 30, 8) and stats.hit_rate == 8 / 30
    scheduler.preempt(third)
    run(each(scheduler.schedule()))
    assert (stats.admitted, stats.preemptions, scheduler.stats.preemptions) == (3, 1, 1) and list(scheduler.running) == [second, third]
    assert 0 < stats.longest_queue_seconds <= stats.queue_seconds <= 3 * stats.longest_queue_seconds


def test_those_that_begin_with_the_same_pages_decode_next_to_each_other() -> None:
    """Three prefixes in turns, one of them with two ways on; whoever shares nothing stays where it was among its equals."""
    scheduler = scheduler_of(num_pages=400, prefix_cache=True, prefix_wait_tokens=0)
    red, green = [1] * 24, [2] * 24
    red_long = red + [3] * 48  # 18 pages: compared at the 17th
    for prompt in (red_long, green):  # leave their pages to those that come
        (request,) = arrive(scheduler, len(prompt), tokens=list(prompt))
        run(each(scheduler.schedule()))
        scheduler.remove(request, share=True)
    prompts = [red_long, green, red, red_long, [5] * 9, green, red, red_long]
    for index, prompt in enumerate(prompts):
        arrive(scheduler, len(prompt) + 4, tokens=[*prompt, 7 + index, 8, 9, 6])
        run(each(scheduler.schedule()))
    decodes = [int(s.request.id[1:]) for s in each(scheduler.schedule())]
    groups = [{0, 3, 7}, {2, 6}, {1, 5}, {4}]
    assert sorted(decodes) == list(range(8)) and list(scheduler.running) != decodes
    for group in (*groups, groups[0] | groups[1]):
        at = sorted(decodes.index(each) for each in group)
        assert at == list(range(at[0], at[0] + len(group))), f"{group} in {decodes}"


def test_the_order_stays_where_nothing_is_shared() -> None:
    scheduler = scheduler_of(prefix_cache=True)
    arrive(scheduler, 9, 10, 11, 12)
    run(each(scheduler.schedule()))
    assert [s.request for s in each(scheduler.schedule())] == list(scheduler.running)
