"""Prefix reuse with recurrent state: a request that starts from a snapshot says what the model's own generate says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn import SamplingParams
from paged_attn.engine.engine import Engine
from paged_attn.engine.requests.request import Request
from paged_attn.engine.steps.in_flight import InFlightStep
from tests.engine.memory.radix_invariants import check_invariants
from tests.engine.models import (
    POISON,
    assert_idle,
    assert_nothing_left,
    fail_once,
    make_engine,
    make_llm,
    oracle,
    poisoned,
    run_all,
    run_past_errors,
    tiny,
)
from tests.engine.test_recurrent import OWN_FORWARD, poison_freed_slots
from tests.oracle import random_prompts
from tests.recurrent_models import recurrent

NAMES = ["qwen3_next", "falcon_h1", "lfm2"]
HYBRID = "lfm2"
NEW = 8
GREEDY = SamplingParams(max_new_tokens=NEW)
STEM, OTHER, THIRD = random_prompts((40, 40, 40), seed=5)
TAILS = random_prompts((9, 23, 1, 17), seed=6)


def poisoned_engine(name: str = HYBRID, **settings: Any) -> Engine:
    engine = make_engine(recurrent(name), **{"page_size": 4, "max_batch_tokens": 64, **settings})
    poison_freed_slots(engine)
    return engine


def ask(engine: Engine, prompt: list[int], new: int = NEW, name: str = HYBRID, **kwargs: Any) -> Request:
    """One request, run to its end; its tokens are right."""
    request = engine.add_request(prompt, SamplingParams(max_new_tokens=new), **kwargs)
    run_all(engine)
    assert request.output_token_ids == oracle(prompt, new, recurrent(name))
    return request


def states_after(engine: Engine, tokens: list[int]) -> list[torch.Tensor]:
    """Those of the snapshot after some tokens."""
    assert engine.kv.tree is not None and engine.state_pool is not None
    node = engine.kv.tree.match(tokens).node
    return [state[node.payload] for state in engine.state_pool.tensors]


def kept_at(engine: Engine) -> list[int]:
    """The numbers of tokens after which the tree has a snapshot."""
    assert engine.kv.tree is not None
    found, stack = [], [(root, 0) for root in engine.kv.tree._roots.values()]
    while stack:
        node, before = stack.pop()
        end = before + len(node.tokens)
        found += [end] if node.payload is not None else []
        stack += [(child, end) for child in node.children.values()]
    return sorted(found)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", NAMES)
def test_a_shared_stem_is_reused_up_to_its_last_page(name: str, page_size: int) -> None:
    model = recurrent(name)
    llm = make_llm(model, page_size=page_size, max_batch_tokens=24, num_pages=400)
    poison_freed_slots(llm.engine)
    kept = 39 // page_size * page_size
    for prompt, cached in [(STEM, 0), *((STEM + tail, kept) for tail in TAILS[:3]), (STEM, kept)]:
        (got,) = llm.generate([prompt], GREEDY)
        assert (got.token_ids, got.cached_tokens) == (oracle(prompt, NEW, model), cached)
    assert llm.engine.stats.cached_tokens == 4 * kept
    prompts = [STEM + tail + extra for tail in TAILS for extra in ([], [7], [8, 9])]
    assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == [oracle(prompt, NEW, model) for prompt in prompts], "all at once"
    assert_nothing_left(llm)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_goes_on_from_its_last_turn(name: str, page_size: int) -> None:
    engine = poisoned_engine(name, page_size=page_size, max_batch_tokens=24, num_pages=400)
    said = list(STEM)
    for turn, more in enumerate([[], *TAILS]):
        said += more
        request = ask(engine, said, name=name)
        before = len(said) - len(more)  # with the answer, whose last token was never attended to
        whole = (before - 1) if page_size == 1 else (before - NEW - 1) // 16 * 16
        assert request.cached_tokens == (whole if turn else 0) or (page_size == 16 and request.cached_tokens == (before - 1) // 16 * 16)
        said += request.output_token_ids
    assert_idle(engine)


def test_where_two_prompts_part_a_state_is_kept_for_the_third() -> None:
    engine = poisoned_engine()
    cached = [ask(engine, STEM + tail).cached_tokens for tail in TAILS]
    assert cached == [0, 0, 40, 40] and 40 in kept_at(engine)
    assert ask(engine, STEM[:18] + OTHER).cached_tokens == 0 and kept_at(engine)[:2] == [16, 40]
    assert ask(engine, STEM[:19] + THIRD).cached_tokens == 16
    short, tails = STEM[:12], [tail for tail in TAILS if len(tail) > 4]
    assert [ask(engine, short + tail, namespace="a").cached_tokens for tail in tails] == [0] * 3, (
        "a fork that saves little is not worth a step"
    )


@pytest.mark.parametrize("settings", [{}, OWN_FORWARD])
@pytest.mark.parametrize("name", NAMES)
def test_a_long_prompt_is_one_step_and_leaves_states_at_regular_distances(name: str, settings: dict[str, Any]) -> None:
    engine = poisoned_engine(name, state_snapshots=64, snapshot_interval=8, overlap=False, **settings)
    ask(engine, STEM, name=name)
    assert engine.stats.steps == NEW and kept_at(engine) == [8, 16, 24, 32, 36]
    for cut in (7, 9, 22, 35, 39):
        assert ask(engine, STEM[:cut] + OTHER, name=name).cached_tokens == (cut // 8 * 8 if cut < 36 else 36)
    assert engine.stats.steps == 6 * NEW, "no prompt takes two"
    assert engine.kv.states.snapshots is not None and engine.kv.states.num_snapshots == len(kept_at(engine)) > 20
    assert_idle(engine)


@pytest.mark.parametrize("name", [*NAMES, "mamba2", "jamba"])
def test_a_state_on_the_way_is_that_of_a_step_that_ends_there(name: str) -> None:
    kept = []
    for tokens in (64, 8):
        engine = poisoned_engine(name, max_batch_tokens=tokens, state_snapshots=64, snapshot_interval=8)
        ask(engine, STEM, 1, name=name)
        assert kept_at(engine) == [8, 16, 24, 32, 36, 40]
        kept.append([states_after(engine, STEM[:end]) for end in kept_at(engine)])
    for one, other in zip(*kept, strict=True):
        for state, same in zip(one, other, strict=True):  # an element that nearly cancels is off by roundings of its terms
            torch.testing.assert_close(state, same, rtol=1e-5, atol=2e-6 * float(same.abs().max()))


@pytest.mark.parametrize("at_once", [True, False])
def test_64_requests_with_one_beginning_compute_it_once_or_twice(at_once: bool) -> None:
    """Who comes after the first has its pages, and where they part no state: the second keeps one."""
    (stem,) = random_prompts((128,), seed=9)
    prompts = [[*stem, 1 + i, 7] for i in range(64)]
    llm = make_llm(recurrent(HYBRID), page_size=1, num_pages=1000, max_batch_tokens=256)
    poison_freed_slots(llm.engine)
    calls = [prompts] if at_once else [[prompt] for prompt in prompts]
    got = [completion.token_ids for some in calls for completion in llm.generate(some, SamplingParams(max_new_tokens=2))]
    assert got == [oracle(prompt, 2, recurrent(HYBRID)) for prompt in prompts]
    stats = llm.engine.scheduler.stats
    assert stats.hit_rate >= 0.95 and stats.prompt_tokens_without_state == (0 if at_once else 128)
    assert llm.engine.stats.prompt_tokens == 64 * 130 - stats.prompt_tokens_cached
    assert_nothing_left(llm)


@pytest.mark.parametrize("start", [96, 97, 128])
def test_continuations_that_are_only_scored_find_a_state(start: int) -> None:
    """They end with their prompt, and leave as much to the next ones as with attention alone; `start` is where a score is wanted first."""
    stem, *tails = random_prompts((128, *[9] * 6), seed=9)
    scored = SamplingParams(max_new_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start)
    computed = []
    for model in (tiny(), recurrent(HYBRID)):
        llm = make_llm(model, page_size=16, num_pages=200, max_batch_tokens=512, prefix_wait_tokens=32)
        llm.generate([[*stem, *tail] for tail in tails], scored)
        computed.append(llm.engine.stats.prompt_tokens)
        llm.generate([[*stem, *reversed(tail)] for tail in tails], scored)
        computed.append(llm.engine.stats.prompt_tokens - computed[-1])
        assert_nothing_left(llm)
    assert computed[2:] == computed[:2], "tokens of the first call, and of the second"


def test_states_at_regular_distances_that_nobody_used_go_first() -> None:
    """Each prompt leaves two of them, and one at its end; from the sixth on there is no room for all."""
    engine = poisoned_engine(state_snapshots=16, snapshot_interval=8, num_pages=400)
    prompts = [STEM, OTHER, *random_prompts((40,) * 6, seed=7)]
    for prompt in prompts[:5]:
        ask(engine, prompt, 2)
    assert ask(engine, STEM[:20] + OTHER[:4], 2).cached_tokens == 16, "that one is used"
    for prompt in prompts[5:]:
        ask(engine, prompt, 2)
    assert kept_at(engine).count(36) == len(prompts) and len(kept_at(engine)) == 16
    assert ask(engine, STEM[:17] + OTHER[:7], 2).cached_tokens == 16
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_is_lost_after_its_launch_leaves_no_states(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """Also the first one of a request, which has nothing to be preempted for but them."""
    engine = poisoned_engine(overlap=overlap)
    request = engine.add_request(STEM, GREEDY)
    wait, calls = InFlightStep.wait, iter(range(10**9))

    def lost(self: InFlightStep) -> None:
        if next(calls) == 0:
            for slot in (request.state_slot, *request.snapshots.values()):
                engine.state_pool.fill(float("nan"), slot)  # type: ignore[union-attr]
            raise RuntimeError("the device is gone")
        wait(self)

    monkeypatch.setattr(InFlightStep, "wait", lost)
    with pytest.raises(RuntimeError, match="gone"):
        run_all(engine)
    run_all(engine)
    assert request.output_token_ids == oracle(STEM, NEW, recurrent(HYBRID)) and ask(engine, STEM).cached_tokens == 36
    assert_idle(engine)


def test_a_finished_request_keeps_its_last_state_where_it_fills_a_page() -> None:
    engine = poisoned_engine()
    for new, kept in ((4, [36]), (5, [36, 44]), (9, [36, 44, 48])):
        ask(engine, STEM, new)
        assert kept_at(engine) == kept
    ask(engine, OTHER, 1)  # its state is at 40, which is shared before it ends
    assert kept_at(engine) == [36, 36, 40, 44, 48]


def test_prefixes_are_namespaces_own() -> None:
    engine = poisoned_engine()
    assert [ask(engine, STEM, namespace=n).cached_tokens for n in (None, "a", None, "a")] == [0, 0, 36, 36]


def test_few_snapshots_go_least_recently_used_first() -> None:
    engine = poisoned_engine(state_snapshots=2)
    assert [ask(engine, prompt, 2).cached_tokens for prompt in (STEM, OTHER, STEM)] == [0, 0, 36]
    assert ask(engine, THIRD, 2).cached_tokens == 0  # in place of OTHER's
    assert [ask(engine, prompt, 2).cached_tokens for prompt in (STEM, OTHER, THIRD, STEM)] == [36, 0, 0, 0]
    assert len(kept_at(engine)) == 2
    assert_idle(engine)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "settings",
    [
        {"state_snapshots": 1},
        {"state_snapshots": 2, "num_pages": 24},
        {"num_pages": 20},
        {"num_pages": 24, "page_size": 1},
        {"snapshot_interval": 8, "state_snapshots": 24, "num_pages": 24},
        {"snapshot_interval": 4, "state_snapshots": 40, "overlap": True, "max_batch_tokens": 13},
    ],
)
def test_scarcity_of_any_kind_leaves_the_tokens_as_they_are(name: str, settings: dict[str, Any]) -> None:
    """Pages for one or two requests: nodes are evicted with their snapshots, and requests are preempted."""
    model = recurrent(name)
    cut = 16 if settings.get("page_size") == 1 else 40
    prompts = [stem[:cut] + tail[: cut // 2] for stem in (STEM, OTHER) for tail in TAILS[:3]] * 2
    prompts = [prompt[:14] for prompt in prompts] if cut == 16 else prompts
    llm = make_llm(model, **{"max_batch_tokens": 24, "max_requests": 3, **settings})
    poison_freed_slots(llm.engine)
    for _ in range(2):
        assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == [oracle(prompt, NEW, model) for prompt in prompts]
    assert llm.engine.stats.cached_tokens > 0 or settings == {"state_snapshots": 1}, "one is always another's by then"
    assert_nothing_left(llm)
    assert llm.engine.kv.states.snapshots is not None and llm.engine.kv.states.snapshots.num_attached == 0


def test_evicted_pages_take_their_snapshots_along() -> None:
    engine = poisoned_engine(num_pages=24)  # 23 usable, 10 per stem
    for prompt in (STEM, OTHER):
        ask(engine, prompt, 1)
    assert kept_at(engine) == [36, 36, 40, 40]
    ask(engine, THIRD, 1)
    assert kept_at(engine) == [36, 36, 40, 40], "STEM's are gone"
    assert ask(engine, OTHER, 1).cached_tokens == 36 and ask(engine, STEM, 1).cached_tokens == 0
    assert_idle(engine)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_preempted_request_goes_on_from_a_snapshot(page_size: int) -> None:
    engine = poisoned_engine(page_size=page_size, num_pages=400, overlap=False)
    requests = [engine.add_request(STEM + tail, GREEDY) for tail in TAILS]
    for step in range(30):
        engine.step()
        if step % 2 and engine.scheduler.running:
            engine.scheduler.preempt(next(iter(engine.scheduler.running)))
    run_all(engine)
    assert [r.output_token_ids for r in requests] == [oracle(STEM + tail, NEW, recurrent(HYBRID)) for tail in TAILS]
    assert engine.scheduler.stats.preemptions > 3
    check_invariants(engine.kv.tree)  # type: ignore[union-attr]
    assert_idle(engine)


@pytest.mark.parametrize("at_call", range(1, NEW + 1))
def test_a_failed_step_leaves_no_state_behind_that_is_ahead_of_its_tokens(at_call: int) -> None:
    """The states have advanced by then, also of requests whose tokens fill a page."""
    engine = poisoned_engine(page_size=1)
    prompts = [STEM, OTHER[:7]]
    requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    fail_once(engine, RuntimeError("out of memory"), at_call)
    try:
        run_all(engine)
    except RuntimeError:
        run_all(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == oracle(prompt, NEW, recurrent(HYBRID))
        for end in range(1, NEW):
            ask(engine, prompt + request.output_token_ids[:end], 3)
    assert_idle(engine)


@pytest.mark.parametrize("at_call", range(1, NEW + 1))
def test_a_request_that_ends_while_the_step_after_it_fails_leaves_no_state_of_that_step(at_call: int) -> None:
    """With overlap its last token is known only when that step has run, and is taken in after it has failed. Whatever a failed step leaves
    in its states is no longer the state of their tokens."""
    engine = poisoned_engine(page_size=1, overlap=True)
    assert engine.state_pool is not None
    prompts = [STEM, OTHER[:7]]
    answers = [oracle(prompt, NEW, recurrent(HYBRID)) for prompt in prompts]
    stops = [SamplingParams(max_new_tokens=2 * NEW, stop_token_ids=(answer[-2],)) for answer in answers]
    requests = [engine.add_request(prompt, stop) for prompt, stop in zip(prompts, stops, strict=True)]
    run, calls = engine.step_runner.run, iter(range(1, 10**9))

    def failing(*args: Any) -> Any:
        output = run(*args)
        if next(calls) == at_call:
            for request in engine.last_scheduled:
                for slot in (request.state_slot, *request.taken_slots.values()):
                    engine.state_pool.fill(float("nan"), slot)  # type: ignore[union-attr]
            raise RuntimeError("out of memory")
        return output

    engine.step_runner.run = failing  # type: ignore[method-assign]
    run_past_errors(engine)
    for prompt, request, answer in zip(prompts, requests, answers, strict=True):
        assert request.output_token_ids == answer[: answer.index(answer[-2]) + 1] and request.finish_reason == "stop"
        for end in range(1, len(request.output_token_ids) + 1):
            ask(engine, prompt + request.output_token_ids[:end], 3)
    assert_idle(engine)


@pytest.mark.parametrize("at", [5, 30, 39])
def test_a_state_that_no_finite_token_vouches_for_is_not_shared(at: int) -> None:
    engine = poisoned_engine(max_batch_tokens=16)
    bad = [*STEM[:at], POISON, *STEM[at + 1 :]]
    with poisoned(recurrent(HYBRID)):
        request = engine.add_request(bad, GREEDY)
        run_all(engine)
        assert request.finish_reason == "error" and kept_at(engine) == []
        assert_idle(engine)
    assert ask(engine, STEM).cached_tokens == 0


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_cancelled_request_gives_its_snapshots_back_or_leaves_them_shared(steps: int) -> None:
    engine = poisoned_engine(max_batch_tokens=20, overlap=False)
    request = engine.add_request(STEM, GREEDY)
    for _ in range(steps):
        engine.step()
    engine.cancel(request.id)
    assert kept_at(engine) == {1: [], 2: [36, 40], 3: [36], 4: [36]}[steps]
    assert_idle(engine)
    assert ask(engine, STEM).cached_tokens == (36 if steps > 1 else 0)


def test_more_running_requests_than_snapshots() -> None:
    """Who finds every slot in other requests' hands goes without."""
    engine = poisoned_engine(state_snapshots=1, max_batch_tokens=130)
    requests = [engine.add_request(prompt, GREEDY) for prompt in (STEM, OTHER, THIRD)]
    run_all(engine)
    assert [r.output_token_ids for r in requests] == [oracle(prompt, NEW, recurrent(HYBRID)) for prompt in (STEM, OTHER, THIRD)]
    assert kept_at(engine) == [36] and ask(engine, STEM).cached_tokens == 36


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_snapshots_work_where_they_must_be_asked_for(name: str) -> None:
    engine = poisoned_engine(name, state_snapshots=4)
    assert [ask(engine, STEM + tail, name=name).cached_tokens for tail in TAILS] == [0, 0, 40, 40]
