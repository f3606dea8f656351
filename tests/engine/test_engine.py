"""`Engine` by itself: requests come, step, end and are cancelled at any time; small pools preempt; prompts share prefixes."""

from __future__ import annotations

import pytest

from paged_attn import SamplingParams
from paged_attn.engine.engine import Engine
from paged_attn.engine.output_processor import EngineStats
from tests.engine.models import assert_idle, make_engine, make_llm, oracle, random_prompts, run_all, tiny, tokenizer

PROMPTS = random_prompts(0, 6, 19, 11, 3)
GREEDY = SamplingParams(max_new_tokens=12)


def close(engine: Engine) -> None:
    assert_idle(engine)
    engine.close()
    assert engine.kv.allocator.num_free == engine.kv.num_usable


def test_an_event_per_token_and_the_reason_in_the_last() -> None:
    engine = make_engine(max_batch_tokens=16, tokenizer=tokenizer())
    requests = [engine.add_request(p, GREEDY, request_id=f"id-{i}") for i, p in enumerate(PROMPTS)]
    assert engine.has_work and [r.id for r in requests] == list(engine.requests)
    events = run_all(engine)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        mine = [e for e in events if e.request_id == request.id]
        assert [e.token_id for e in mine] == oracle(prompt) == request.output_token_ids
        assert [e.finish_reason for e in mine] == [None] * 11 + ["length"] and request.finish_reason == "length"
        assert "".join(e.text for e in mine) == tokenizer().decode(oracle(prompt)) == request.detokenizer.text
    assert not engine.has_work and engine.step() == []
    close(engine)


def test_requests_join_while_others_run() -> None:
    engine = make_engine(max_batch_tokens=8)
    requests = []
    for prompt in PROMPTS:
        requests.append(engine.add_request(prompt, GREEDY))
        for _ in range(3):
            engine.step()
    run_all(engine)
    assert [r.output_token_ids for r in requests] == [oracle(p) for p in PROMPTS]
    close(engine)


def test_statistics_add_up() -> None:
    engine = make_engine(max_batch_tokens=8)
    for prompt in PROMPTS:
        engine.add_request(prompt, GREEDY)
    run_all(engine)
    engine.add_request(PROMPTS[1], GREEDY)
    run_all(engine)
    stats = engine.stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.new_tokens) == (6 + 19 + 11 + 3 + 3, 16, 60)
    assert stats.steps > 12 and stats.model_seconds > 0
    stats.reset()
    assert stats == EngineStats()
    engine.add_request(PROMPTS[1], GREEDY)
    run_all(engine)
    assert (engine.stats.prompt_tokens, engine.stats.cached_tokens, engine.stats.new_tokens) == (3, 16, 12) and engine.stats.steps >= 12


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = make_engine()
    engine.add_request(PROMPTS[0], GREEDY, request_id="mine")
    engine.step()
    with pytest.raises(ValueError, match="request id 'mine' is in use by an unfinished request"):
        engine.add_request(PROMPTS[1], GREEDY, request_id="mine")
    run_all(engine)
    second = engine.add_request(PROMPTS[1], GREEDY, request_id="mine")
    run_all(engine)
    assert second.output_token_ids == oracle(PROMPTS[1])
    close(engine)


def test_an_engine_gives_no_id_that_a_caller_has_chosen() -> None:
    engine = make_engine()
    ids = [
        engine.add_request([1, 2], SamplingParams(max_new_tokens=1), request_id=chosen).id for chosen in ("request-1", "request-2", None)
    ]
    assert ids == ["request-1", "request-2", "request-3"]
    run_all(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_cancel_at_any_time(victim: int, steps: int) -> None:
    """With 8 tokens a step and two places: waiting, in the middle of the prompt, before and after the first token."""
    engine = make_engine(max_batch_tokens=8, max_requests=2)
    requests = [engine.add_request(p, GREEDY) for p in PROMPTS[:3]]
    for _ in range(steps):
        engine.step()
    before = list(requests[victim].output_token_ids)
    assert engine.cancel(requests[victim].id)
    assert not engine.cancel(requests[victim].id), "the second time it is unknown"
    assert (requests[victim].finish_reason, list(requests[victim].pages)) == ("cancelled", [])
    run_all(engine)
    for i, (request, prompt) in enumerate(zip(requests, PROMPTS, strict=False)):
        assert request.output_token_ids == (before if i == victim else oracle(prompt))
    assert oracle(PROMPTS[victim])[: len(before)] == before
    again = engine.add_request(PROMPTS[victim], GREEDY)  # over whatever it left in the prefix cache
    run_all(engine)
    assert again.output_token_ids == oracle(PROMPTS[victim])
    close(engine)


def test_cancel_of_what_has_ended_or_never_was_is_false() -> None:
    engine = make_engine()
    request = engine.add_request(PROMPTS[0], GREEDY)
    run_all(engine)
    assert not engine.cancel(request.id) and not engine.cancel("never was")
    assert request.finish_reason == "length"


def test_close_cancels_everything_and_the_engine_can_be_used_again() -> None:
    engine = make_engine(max_requests=1)
    running, waiting = (engine.add_request(p, GREEDY) for p in PROMPTS[:2])
    for _ in range(4):
        engine.step()
    engine.close()
    assert (running.finish_reason, waiting.finish_reason) == ("cancelled", "cancelled")
    close(engine)
    again = engine.add_request(PROMPTS[0], GREEDY)
    run_all(engine)
    assert again.output_token_ids == oracle(PROMPTS[0])


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("max_batch_tokens", [5, 2048])
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_preempted_requests_say_the_same(name: str, max_batch_tokens: int, prefix_cache: bool) -> None:
    llm = make_llm(tiny(name), num_pages=14, max_batch_tokens=max_batch_tokens, prefix_cache=prefix_cache)
    prompts = random_prompts(1, 5, 8, 3, 11, 7)
    results = llm.generate(prompts, SamplingParams(max_new_tokens=24))
    assert llm.engine.scheduler.stats.preemptions > 0
    assert [r.token_ids for r in results] == [oracle(p, 24, tiny(name)) for p in prompts]
    close(llm.engine)


def test_preemption_does_not_change_what_a_seed_draws() -> None:
    prompts = random_prompts(2, 5, 8, 3, 11, 7)
    params = [SamplingParams(max_new_tokens=24, temperature=0.8, seed=i, repetition_penalty=1.2, logprobs=1) for i in range(5)]
    roomy, tight = make_llm(num_pages=400), make_llm(num_pages=14)
    expected, got = ([c.token_ids for c in llm.generate(prompts, params)] for llm in (roomy, tight))
    assert roomy.engine.scheduler.stats.preemptions == 0 < tight.engine.scheduler.stats.preemptions
    assert got == expected != [oracle(p, 24) for p in prompts]
    close(tight.engine)


def test_preemption_shows_every_token_once() -> None:
    llm = make_llm(num_pages=14, tokenizer=tokenizer())
    prompts = random_prompts(3, 5, 8, 3, 11, 7)
    events = list(llm.stream(prompts, SamplingParams(max_new_tokens=24)))
    assert llm.engine.scheduler.stats.preemptions > 0
    for i, prompt in enumerate(prompts):
        assert [e.token_id for e in events if e.index == i] == oracle(prompt, 24)
        assert "".join(e.text for e in events if e.index == i) == tokenizer().decode(oracle(prompt, 24))


def test_a_cancelled_preempted_request_leaves_nothing() -> None:
    engine = make_engine(num_pages=14)
    requests = [engine.add_request(p, SamplingParams(max_new_tokens=24)) for p in random_prompts(1, 5, 8, 3, 11, 7)]
    while not engine.scheduler.stats.preemptions:
        engine.step()
    preempted = next(r for r in requests if r.num_sampled and r in engine.scheduler.waiting)
    assert engine.cancel(preempted.id)
    run_all(engine)
    for request in requests:
        assert request.output_token_ids == oracle(request.prompt_token_ids, 24)[: len(request.output_token_ids)]
        assert request is preempted or len(request.output_token_ids) == 24
    close(engine)


def test_cached_tokens_are_whole_pages_and_never_the_last_token() -> None:
    llm = make_llm(page_size=4)
    prompt = random_prompts(4, 12)[0]
    cached = [llm.generate(p, GREEDY)[0].cached_tokens for p in (prompt, prompt, prompt[:9], prompt[:7] + [1], [*prompt, 5])]
    assert cached == [0, 8, 8, 4, 12]
    reply = oracle(prompt)
    (turn,) = llm.generate([*prompt, *reply, 7], GREEDY)
    assert turn.cached_tokens == 20, "of a reply of 12 the last token was never computed"
    assert turn.token_ids == oracle([*prompt, *reply, 7])
    close(llm.engine)


@pytest.mark.parametrize(
    ("settings", "cached"),
    [({"max_requests": 1}, 16), ({"max_batch_tokens": 17}, 16), ({"max_batch_tokens": 5}, 0)],  # 5: begins beside the first's last chunk
)
def test_a_prompt_is_shared_within_one_batch_as_soon_as_it_is_done(settings: dict[str, int], cached: int) -> None:
    llm = make_llm(overlap=False, **settings)
    prompt = random_prompts(5, 17)[0]
    results = llm.generate([prompt, prompt, [*prompt, 9]], GREEDY)
    assert [r.cached_tokens for r in results] == [0, cached, 16]
    assert [r.token_ids for r in results] == [oracle(prompt), oracle(prompt), oracle([*prompt, 9])]
    close(llm.engine)


def test_equal_prompts_computed_in_one_step_keep_one_copy() -> None:
    engine = make_engine(overlap=False)
    prompt = random_prompts(5, 17)[0]
    requests = [engine.add_request(prompt, GREEDY) for _ in range(4)]
    engine.step()
    assert engine.kv.num_usable - engine.kv.allocator.num_free == 4 + 4 * 1, "four shared pages, and for each request the begun one"
    run_all(engine)
    assert [r.output_token_ids for r in requests] == [oracle(prompt)] * 4
    close(engine)


def test_namespaces_do_not_share() -> None:
    llm = make_llm()
    prompt = random_prompts(6, 17)[0]
    for namespace, cached in ((None, 0), ("a", 0), ("b", 0), ("a", 16), (None, 16)):
        (got,) = llm.generate(prompt, GREEDY, namespace=namespace)
        assert (got.cached_tokens, got.token_ids) == (cached, oracle(prompt))
    assert next(iter(llm.stream(prompt, GREEDY, namespace="b"))).token_id == oracle(prompt)[0]
    assert llm.engine.stats.cached_tokens == 48


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    llm = make_llm(prefix_cache=False)
    for _ in range(2):
        assert llm.generate(PROMPTS[1], GREEDY)[0].cached_tokens == 0
        assert llm.engine.kv.allocator.num_free == llm.engine.kv.num_usable


def test_a_full_cache_makes_room_by_eviction_and_not_by_preemption() -> None:
    llm = make_llm(num_pages=17)  # 16 usable; each request needs 7 to 8 and leaves most of them in the cache
    prompts = random_prompts(7, *[20] * 8)
    for prompt in [*prompts, *prompts]:
        assert llm.generate(prompt, GREEDY)[0].token_ids == oracle(prompt)
        assert_idle(llm.engine)
    assert llm.engine.scheduler.stats.preemptions == 0
    assert llm.generate(prompts[-1], GREEDY)[0].cached_tokens == 16, "the last one used is still there"
    close(llm.engine)
