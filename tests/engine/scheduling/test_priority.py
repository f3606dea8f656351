"""Priority on its way from the calls to the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from paged_attn import EngineConfig, SamplingParams
from paged_attn.attn_ops.kv.layer_groups import LayerGroup, Retention
from paged_attn.engine.memory.budget import StateSlots
from paged_attn.engine.memory.grouped_kv import GroupedKVManager
from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.scheduling.scheduler import Scheduler
from tests.engine.models import make_engine, make_llm, oracle, random_prompts
from tests.engine.scheduling.schedulers import arrive, collect, each, launch, run
from tests.engine.scheduling.world import FakeStates


def test_the_more_urgent_request_ends_first_and_tokens_stay_right() -> None:
    engine = make_engine(max_requests=1, overlap=False)
    prompts = random_prompts(5, 6, 7, 8)
    requests = [
        engine.add_request(p, SamplingParams(max_new_tokens=4, ignore_eos=True), priority=v)
        for p, v in zip(prompts, (1, 0, -1), strict=True)
    ]
    ended: list[str] = []
    while engine.has_work:
        ended += [event.request_id for event in engine.step() if event.finish_reason]
    assert ended == [request.id for request in reversed(requests)]
    assert [r.output_token_ids for r in requests] == [oracle(prompt, 4) for prompt in prompts]


@pytest.mark.parametrize("priority", [None, "high", 1.0, True])
def test_a_priority_that_is_no_whole_number_is_refused(priority: Any) -> None:
    engine = make_engine()
    with pytest.raises(TypeError, match="a lower one is more urgent"):
        engine.add_request([1], priority=priority)
    assert not engine.has_work


def test_llm_hands_it_on() -> None:
    llm = make_llm()
    llm.generate([1, 2], SamplingParams(max_new_tokens=1), priority=0)
    for call in (llm.generate, llm.stream):
        with pytest.raises(TypeError, match="priority is 'high'"):
            call([1, 2], priority="high")


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_pages_that_a_victim_has_in_the_cache_count_as_what_it_gives(prefix_cache: bool) -> None:
    engine = make_engine(num_pages=21, page_size=4, max_requests=4, prefix_cache=prefix_cache, overlap=False)
    prompts = random_prompts(1, 64, 40)
    patient = engine.add_request(prompts[0], SamplingParams(max_new_tokens=14, ignore_eos=True), priority=9)
    engine.step()
    urgent = engine.add_request(prompts[1], SamplingParams(max_new_tokens=2, ignore_eos=True), priority=0)
    ended = []
    while engine.has_work:
        ended += [event.request_id for event in engine.step() if event.finish_reason]
    assert ended == [urgent.id, patient.id] and engine.scheduler.stats.preemptions == 1
    assert patient.output_token_ids == oracle(prompts[0], 14) and urgent.output_token_ids == oracle(prompts[1], 2)


def test_what_lies_behind_a_victims_window_is_not_counted_twice() -> None:
    """It is there without it: nobody is preempted in vain."""
    kv = GroupedKVManager([LayerGroup((0,), Retention(4))], 21, 4, False, 1000)
    scheduler = Scheduler(EngineConfig(page_size=4, max_requests=8, max_batch_tokens=1000, prefix_cache=False), kv)
    (urgent,) = arrive(scheduler, 4, priority=0)
    (patient,) = arrive(scheduler, 56, priority=5)
    for _ in range(2):
        run(each(scheduler.schedule()))
    (large,) = arrive(scheduler, 76, priority=0)
    for _ in range(6):
        run(each(scheduler.schedule()))
    assert list(scheduler.running) == [urgent, patient] and scheduler.stats.preemptions == 0 and list(scheduler.waiting) == [large]


def test_the_state_of_a_victim_gives_its_slot() -> None:
    """And does not become one that the cache keeps, though it could."""
    kv = KVManager(200, 4, True, StateSlots(17, 16, 1), FakeStates(17), 0)  # type: ignore[arg-type]
    scheduler = Scheduler(EngineConfig(page_size=4, max_requests=32, max_batch_tokens=1000, prefix_wait_tokens=0), kv)

    def step() -> None:
        scheduled = each(scheduler.schedule())
        launch(scheduled)
        kv.states.keep([s.request for s in scheduled])
        for request in (s.request for s in scheduled if s.samples):
            collect(request)
            if request.num_sampled == 1 or request.snapshots:
                kv.share(request)

    for index in range(15):
        arrive(scheduler, 3, tokens=[10 + index] * 3, priority=0)
    (patient,) = arrive(scheduler, 4, tokens=[99] * 4, priority=5)
    step()
    (urgent,) = arrive(scheduler, 3, tokens=[77] * 3, priority=0)
    step()
    assert urgent in scheduler.running and patient not in scheduler.running and scheduler.stats.preemptions == 1
