"""Requests that wait for the one that computes their prefix: it is computed once, and nobody waits for ever."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paged_attn import SamplingParams
from paged_attn.engine.requests.request import Request
from paged_attn.engine.scheduling.scheduler import HELD_PER_STEP, Scheduler
from paged_attn.engine.scheduling.shared_prefills import MAX_WAITS
from tests.engine.models import make_engine, oracle, random_prompts
from tests.engine.scheduling.schedulers import Scheduled, arrive, collect, counts, each, launch, run, scheduler_of
from tests.engine.scheduling.world import POISON, World

PREFIX = [5] * 16


def waiting_for_it(scheduler: Scheduler) -> set[Request]:
    return set(scheduler.waiting._aside)


def scheduler_with(prefix_wait_tokens: int = 8, **config: Any) -> Scheduler:
    return scheduler_of(prefix_cache=True, prefix_wait_tokens=prefix_wait_tokens, **config)


def sharing(scheduler: Scheduler, *own: int, prefix: list[int] = PREFIX, **more: Any) -> list[Request]:
    """A request for each own token: the prefix, and this token three times."""
    return [arrive(scheduler, 0, tokens=[*prefix, token, token, token], **more)[0] for token in own]


def engine_world(requests: int, overlap: bool, snapshots: int | None = None, prefix: int = 2048, own: int = 32, **config: Any) -> World:
    rng = random.Random(0)
    world = World(rng, 1000, 16, overlap=overlap, snapshots=snapshots, stops=10**18, **config)
    stem = [rng.choice([1, 2, 3]) for _ in range(prefix)]
    for i in range(requests):
        world.add([*stem, 4 + i, *(rng.choice([1, 2, 3]) for _ in range(own - 1))], 4)
    return world


def run_to_the_end(world: World) -> None:
    while world.requests:
        world.step()
    world.check_empty()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("snapshots", [None, 100])
@pytest.mark.parametrize("budget", [500, 2048, 16384])
def test_64_requests_compute_the_2048_tokens_that_they_share_once(overlap: bool, snapshots: int | None, budget: int) -> None:
    world = engine_world(64, overlap, snapshots, max_batch_tokens=budget)
    run_to_the_end(world)
    assert world.computed == 2048 + 64 * (32 + 3), "each computes its own tokens and all new ones but the last"
    assert 31 <= world.scheduler.stats.held_back <= 64, "some were not looked at before it was there"
    assert world.scheduler.stats.hit_rate >= 0.95 and not world.scheduler.stats.prompt_tokens_without_state


@pytest.mark.parametrize("prefix", [1040, 1104, 2048])
def test_a_regular_state_near_the_fork_does_not_stand_in_for_one_there(prefix: int) -> None:
    world = engine_world(32, False, 100, prefix=prefix, max_batch_tokens=4096)
    run_to_the_end(world)
    assert world.computed == prefix + 32 * (32 + 3)


def test_who_fills_the_step_up_to_the_fork_has_no_state_there_without_regular_ones() -> None:
    """The others are not looked at before."""
    world = engine_world(64, False, 100, max_batch_tokens=2048, snapshot_interval=0)
    run_to_the_end(world)
    assert world.computed == 2 * 2048 + 64 * (32 + 3) and world.scheduler.stats.hit_rate >= 0.95


def test_all_of_them_start_as_soon_as_the_first_token_is_there() -> None:
    scheduler = scheduler_with(max_batch_tokens=64)
    first, second, third = sharing(scheduler, 6, 7, 8)
    launch(scheduled := each(scheduler.schedule()))
    assert counts(scheduled) == [("r0", 19, True)] and waiting_for_it(scheduler) == {second, third}
    assert scheduler.wants_drain, "better than a step of one decode"
    launch(scheduled := each(scheduler.schedule(drained=False)))
    assert counts(scheduled) == [("r0", 1, True)] and waiting_for_it(scheduler) == {second, third}, "its token is on its way"
    collect(first)
    assert counts(each(scheduler.schedule(drained=False))) == [("r0", 1, True), ("r1", 3, True), ("r2", 3, True)]
    assert second.pages[:4] == third.pages[:4] == first.pages[:4] and not waiting_for_it(scheduler)


def test_many_decodes_do_not_stop_for_few_that_wait() -> None:
    scheduler = scheduler_with()
    decodes = arrive(scheduler, 1, 1, namespace="other")
    run(each(scheduler.schedule()))
    sharing(scheduler, 6, 7, 8)
    scheduled = each(scheduler.schedule())
    assert len(waiting_for_it(scheduler)) == len(decodes) == 2 and len(scheduled) == 3 and not scheduler.wants_drain


def test_those_behind_who_share_nothing_go_on() -> None:
    scheduler = scheduler_with()
    first, held, other = [*sharing(scheduler, 6, 7), *arrive(scheduler, 0, tokens=[6] * 12)]
    assert [s.request for s in each(scheduler.schedule())] == [first, other] and waiting_for_it(scheduler) == {held}
    assert list(scheduler.waiting) == [held] and len(scheduler.waiting) == 1 and held in scheduler.waiting


@pytest.mark.parametrize("least, held", [(1, True), (8, True), (13, True), (16, True), (17, False), (0, False)])
def test_who_would_save_too_little_does_not_wait(least: int, held: bool) -> None:
    """The prefix has 16 tokens in pages of 4: up to 16 are worth it, as whole pages."""
    scheduler = scheduler_with(least)
    sharing(scheduler, 6, 7)
    assert len(each(scheduler.schedule())) == (1 if held else 2)


def test_what_is_cached_already_is_nothing_to_wait_for() -> None:
    scheduler = scheduler_with(4)
    (first,) = sharing(scheduler, 6)
    run(each(scheduler.schedule()))
    scheduler.kv.share(first)
    requests = sharing(scheduler, 7, 8) + sharing(scheduler, 7)
    chosen = [s.request for s in each(scheduler.schedule())]
    assert chosen == [first, *requests], "they differ in the page after it"
    more = arrive(scheduler, 0, tokens=[*PREFIX, 1, 1, 1, 1, 2])[0], arrive(scheduler, 0, tokens=[*PREFIX, 1, 1, 1, 1, 3])[0]
    assert more[0] in [s.request for s in each(scheduler.schedule())] and waiting_for_it(scheduler) == {more[1]}, "4 more tokens in common"


def test_only_whole_pages_count() -> None:
    """5 tokens are two pages of 4 to save; 7 in common are one."""
    scheduler = scheduler_with(5)
    sharing(scheduler, 6, 7, prefix=[5] * 7)
    assert len(each(scheduler.schedule())) == 2


@pytest.mark.parametrize(("length", "held"), [(8, False), (9, True)])
def test_the_last_token_of_a_prompt_is_never_shared(length: int, held: bool) -> None:
    """It has to be computed for its logits, so that the second of two prompts of 8 tokens could only take one page of 4."""
    scheduler = scheduler_with(8)
    arrive(scheduler, 0, 0, tokens=[5] * length)
    assert len(each(scheduler.schedule())) == (1 if held else 2)


def test_equal_tokens_after_different_prefixes_are_not_shared() -> None:
    scheduler = scheduler_with()
    for request in sharing(scheduler, 6, prefix=[5] * 16) + sharing(scheduler, 6, prefix=[7] * 16):
        run(each(scheduler.schedule()))
        scheduler.remove(request, share=True)
    requests = sharing(scheduler, 6, prefix=[5] * 16 + [8] * 8) + sharing(scheduler, 6, prefix=[7] * 16 + [8] * 8)
    assert [s.request for s in each(scheduler.schedule())] == requests and [r.cached_tokens for r in requests] == [16, 16]


@pytest.mark.parametrize("how", ["namespace", "no prefix cache", "less urgent holder"])
def test_who_can_not_or_should_not_share_does_not_wait(how: str) -> None:
    scheduler = scheduler_of(prefix_cache=how != "no prefix cache", prefix_wait_tokens=8)
    sharing(scheduler, 6, priority=1)
    each(scheduler.schedule())
    (second,) = sharing(scheduler, 7, priority=0 if how == "less urgent holder" else 1, namespace="a" if how == "namespace" else None)
    assert second in [s.request for s in each(scheduler.schedule())]


def test_when_a_less_urgent_holder_goes_the_more_urgent_one_still_holds() -> None:
    scheduler = scheduler_with()
    (idle,) = sharing(scheduler, 6, priority=1)
    each(scheduler.schedule())
    sharing(scheduler, 7)
    each(scheduler.schedule())
    scheduler.remove(idle, share=False)
    (third,) = sharing(scheduler, 8)
    each(scheduler.schedule())
    assert waiting_for_it(scheduler) == {third}


@pytest.mark.parametrize("end", ["cancelled", "preempted", "failed"])
def test_when_the_holder_goes_another_computes_it(end: str) -> None:
    scheduler = scheduler_with(max_batch_tokens=12)
    first, second, third = sharing(scheduler, 6, 7, 8)
    run(each(scheduler.schedule()))
    each(scheduler.schedule())
    assert waiting_for_it(scheduler) == {second, third}, "the second chunk leaves some of the budget"
    if end == "preempted":
        scheduler.preempt(first)
    else:
        scheduler.remove(first, share=end == "cancelled")
    assert not waiting_for_it(scheduler) and second in scheduler.waiting
    next_holder = first if end == "preempted" else second
    assert counts(each(scheduler.schedule())) == [(next_holder.id, 12, False)]
    run([Scheduled(next_holder, 12, False)])
    each(scheduler.schedule())
    assert waiting_for_it(scheduler) == {first, second, third} - {next_holder} & set(scheduler.waiting)


def test_one_that_waits_can_be_cancelled() -> None:
    scheduler = scheduler_with()
    first, second, third = sharing(scheduler, 6, 7, 8)
    run(each(scheduler.schedule()))
    scheduler.remove(second, share=False)
    assert waiting_for_it(scheduler) == {third} and list(scheduler.waiting) == [third]
    assert [s.request for s in each(scheduler.schedule())] == [first, third]
    for request in (first, third):
        scheduler.remove(request, share=True)
    assert not any(vars(scheduler._prefills)[name] for name in ("_holders", "_prefixes", "_held", "_waits_for", "_times"))


def test_nobody_is_held_back_more_often_than_the_limit() -> None:
    scheduler = scheduler_with()
    requests = sharing(scheduler, *range(6, 16))
    for holder in requests[:MAX_WAITS]:
        assert [s.request for s in each(scheduler.schedule())] == [holder]
        scheduler.remove(holder, share=False)
    assert [s.request for s in each(scheduler.schedule())] == requests[MAX_WAITS:]


def test_a_holder_that_was_preempted_shares_as_soon_as_it_has_recomputed_the_prefix() -> None:
    """It has sampled tokens already, for which the engine does not share once more."""
    scheduler = scheduler_with()
    (first,) = sharing(scheduler, 6)
    run(each(scheduler.schedule()))
    scheduler.preempt(first)
    assert scheduler.kv.tree is not None
    scheduler.kv.tree.clear()
    launch(each(scheduler.schedule()))
    (second,) = sharing(scheduler, 7)
    each(scheduler.schedule(drained=False))
    assert waiting_for_it(scheduler) == {second}
    collect(first)
    assert [s.request for s in each(scheduler.schedule())] == [first, second] and second.cached_tokens == 16


def test_a_flood_of_equal_prompts_is_set_aside_little_by_little() -> None:
    scheduler = scheduler_with(max_batch_tokens=2)
    sharing(scheduler, *([6] * 100))
    (other,) = arrive(scheduler, 0, tokens=[7] * 3, namespace="other")
    held = []
    for _ in range(3):
        launch(each(scheduler.schedule(drained=False)))
        held.append(len(waiting_for_it(scheduler)))
    assert held == [0, 0, 0], "the holder takes the whole budget"
    scheduler = scheduler_with(max_batch_tokens=10)
    sharing(scheduler, *([6] * 100))
    scheduler.config = scheduler.config.with_(max_batch_tokens=40)
    (other,) = arrive(scheduler, 0, tokens=[7] * 3, namespace="other")
    launch(each(scheduler.schedule()))
    assert other in scheduler.running and len(waiting_for_it(scheduler)) == HELD_PER_STEP
    launch(each(scheduler.schedule(drained=False)))
    assert len(waiting_for_it(scheduler)) == 2 * HELD_PER_STEP


@pytest.mark.parametrize("snapshots", [None, 4])
def test_a_holder_with_nan_takes_nobody_along(snapshots: int | None) -> None:
    world = World(random.Random(0), 100, 4, overlap=True, snapshots=snapshots, stops=10**18, prefix_wait_tokens=8)
    bad = world.add([*PREFIX, POISON, 1], 3)
    good = [world.add([*PREFIX, 2, 3 + i], 3) for i in range(3)]
    run_to_the_end(world)
    assert not bad.num_sampled and [request.num_sampled for request in good] == [3, 3, 3]


def test_a_recurrent_holder_keeps_its_state_where_the_others_part_from_it() -> None:
    """Once at the end of the prefix they all share, and once more where two of them share more."""
    world = World(random.Random(0), 100, 4, overlap=False, snapshots=8, stops=10**18, prefix_wait_tokens=4)
    for tail in ([1] * 9, [2] * 9, [1] * 6 + [3] * 3):
        world.add([*PREFIX, *tail], 1)
    world.step()
    run_to_the_end(world)
    assert world.trace == [[("r0", 25, True)], [("r1", 9, True), ("r2", 5, True)]], "the third parts at 20, the second at 16"


def test_a_recurrent_holder_that_is_past_the_fork_is_not_waited_for() -> None:
    world = World(random.Random(0), 100, 4, overlap=False, snapshots=8, stops=10**18, prefix_wait_tokens=4, max_batch_tokens=30)
    world.add([*PREFIX, *[1] * 40], 1)
    world.step()
    world.add([*PREFIX, *[2] * 9], 1)
    world.step()
    assert world.trace[1] == [("r0", 26, True), ("r1", 4, False)]
    run_to_the_end(world)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_engine_computes_a_shared_prefix_once_and_its_tokens_are_right(overlap: bool) -> None:
    (prefix,) = random_prompts(1, 40)
    prompts = [[*prefix, *own] for own in random_prompts(2, *[5] * 6)]
    with_wait, without = (make_engine(prefix_wait_tokens=tokens, overlap=overlap, prefix_cache=True) for tokens in (16, 0))
    for engine, computed in ((with_wait, 40 + 6 * 5), (without, 6 * 45)):
        requests = [engine.add_request(prompt, SamplingParams(max_new_tokens=6, ignore_eos=True)) for prompt in prompts]
        while engine.has_work:
            engine.step()
        assert [r.output_token_ids for r in requests] == [oracle(prompt, 6) for prompt in prompts]
        assert engine.stats.prompt_tokens == computed
