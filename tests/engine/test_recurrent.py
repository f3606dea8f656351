"""Models with recurrent state generate what they generate by themselves: ragged, chunked, preempted, cancelled, slots used again."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

from paged_attn import LLM, SamplingParams
from paged_attn.engine.engine import Engine
from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.recurrent.run import RecurrentRunner
from tests.engine.models import assert_idle, fail_once, make_engine, make_llm, run_all
from tests.oracle import greedy, random_prompts
from tests.recurrent_models import RECURRENT, recurrent, without_cache

PROMPTS = random_prompts((1, 5, 17, 33, 70))
NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW)
HYBRID = "falcon_h1"  # attention and state in every layer
OWN_FORWARD = {"disable_passes": ("scans",)}  # each layer runs its own forward, one request after another
NOT_IN_CHUNKS = ("jamba", "mamba")  # by their own forward: no snapshots unless asked for


@functools.cache
def expected(name: str) -> list[list[int]]:
    return [greedy(recurrent(name), prompt, NEW) for prompt in PROMPTS]


def poison_freed_slots(engine: Engine) -> list[int]:
    """From now on a slot, of a request or a snapshot, becomes NaN when it is freed; returns the list of those that were."""
    assert engine.state_pool is not None and engine.kv.states.allocator is not None
    states, freed, free = engine.state_pool, list[int](), engine.kv.states.allocator.free

    def poisoning(slot: int) -> None:
        free(slot)
        states.fill(float("nan"), slot)
        freed.append(slot)

    engine.kv.states.allocator.free = poisoning  # type: ignore[method-assign]
    states.fill(float("nan"))
    return freed


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(pytest.param(name, {}, id=name) for name in RECURRENT),
        *(pytest.param(name, OWN_FORWARD, id=f"{name}, own forward") for name in ("qwen3_next", "falcon_h1", "mamba")),
    ],
)
def test_same_tokens_as_generate_and_as_a_loop_without_cache(name: str, settings: dict[str, Any]) -> None:
    model = recurrent(name)
    assert expected(name) == [without_cache(model, prompt, NEW) for prompt in PROMPTS]
    assert all(len(set(tokens)) > 3 for tokens in expected(name)), "an oracle that repeats itself shows nothing"
    for page_size in (1, 16):
        llm = make_llm(model, page_size=page_size, max_batch_tokens=16, num_pages=400, **settings)
        assert all(bool(layer.ops) is not bool(settings) for layer in llm.engine.runner.recurrent)
        poison_freed_slots(llm.engine)
        for run in ("first", "second"):
            got = llm.generate(PROMPTS, GREEDY)
            assert [c.token_ids for c in got] == expected(name), f"{name}, page size {page_size}, {run} run"
            reused = run == "second" and llm.engine.kv.states.snapshots is not None
            kept = [(len(prompt) - 1) // page_size * page_size for prompt in PROMPTS]  # what the first run left behind
            assert [c.cached_tokens for c in got] == (kept if reused else [0] * 5)
        assert (llm.engine.kv.states.snapshots is None) == (bool(settings) and name in NOT_IN_CHUNKS)
        assert_idle(llm.engine)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_preempted_requests_start_again(name: str) -> None:
    llm = make_llm(recurrent(name), page_size=4, num_pages=23, max_batch_tokens=16)
    poison_freed_slots(llm.engine)
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected(name)
    assert llm.engine.scheduler.stats.preemptions > 0
    assert_idle(llm.engine)


def test_fewer_slots_than_requests() -> None:
    llm = make_llm(recurrent(HYBRID), max_requests=2, max_batch_tokens=16, state_snapshots=3)
    freed = poison_freed_slots(llm.engine)
    assert llm.engine.state_pool is not None and llm.engine.state_pool.num_slots == 1 + 2 + 3
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected(HYBRID)
    assert freed and set(freed) <= {1, 2, 3, 4, 5} and llm.engine.kv.states.num_in_use == 0


def test_requests_wait_for_a_slot_where_memory_holds_fewer_than_max_requests() -> None:
    each = sum(layer.spec.nbytes for layer in make_engine(recurrent(HYBRID)).runner.recurrent)
    llm = make_llm(recurrent(HYBRID), num_pages=30, kv_memory_gib=6 * each / 2**30, max_batch_tokens=16)
    assert llm.engine.state_pool is not None and llm.engine.state_pool.num_slots == 3 < llm.engine.config.max_requests
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected(HYBRID)


def test_a_cancelled_requests_slot_serves_the_next_one() -> None:
    engine = make_engine(recurrent(HYBRID), max_requests=1, max_batch_tokens=8)
    freed = poison_freed_slots(engine)
    first = engine.add_request(PROMPTS[3], GREEDY)
    second = engine.add_request(PROMPTS[2], GREEDY)
    for _ in range(3):  # in the middle of its prompt
        engine.step()
    assert first.state_slot == 1 and second.state_slot == 0
    engine.cancel(first.id)
    assert freed == [1]
    run_all(engine)
    assert second.output_token_ids == expected(HYBRID)[2]
    assert_idle(engine)


@pytest.mark.parametrize("at_call", [1, 4, 9])
def test_a_failed_step_is_computed_anew(at_call: int) -> None:
    """The states had advanced when the model failed; the next step must not start from them."""
    engine = make_engine(recurrent(HYBRID), max_batch_tokens=16)
    poison_freed_slots(engine)
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    fail_once(engine, RuntimeError("out of memory"), at_call)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_all(engine)
    run_all(engine)
    assert [r.output_token_ids for r in requests] == expected(HYBRID)
    assert_idle(engine)


def test_a_step_that_fails_inside_a_layer_is_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(recurrent(HYBRID), max_batch_tokens=16, **OWN_FORWARD)
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    forward, calls = RecurrentRunner.forward, iter(range(1000))

    def failing(self: Any, *args: Any) -> None:
        forward(self, *args)
        if next(calls) == 16:
            raise KeyboardInterrupt

    monkeypatch.setattr(RecurrentRunner, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        run_all(engine)
    run_all(engine)
    assert [r.output_token_ids for r in requests] == expected(HYBRID)


def test_many_short_requests_share_slots_in_any_order() -> None:
    model = recurrent("lfm2")
    prompts = random_prompts([1, 2, 3, 9, 4, 1, 12, 6, 2, 20, 1, 5], seed=8)
    params = [SamplingParams(max_new_tokens=1 + 3 * i % 7) for i in range(len(prompts))]
    llm = make_llm(model, max_requests=3, max_batch_tokens=7, page_size=2, num_pages=40)
    poison_freed_slots(llm.engine)
    got = [c.token_ids for c in llm.generate(prompts, params)]
    assert got == [greedy(model, prompt, each.max_new_tokens) for prompt, each in zip(prompts, params, strict=True)]
    assert_idle(llm.engine)


@pytest.mark.parametrize("name", ["falcon_h1", "mamba2"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    model = recurrent(name)
    before = {n: set(vars(m)) for n, m in model.named_modules()}
    values = {n: t.clone() for n, t in model.state_dict().items()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    model.train()
    try:
        TracedRunner(model, make_engine(model).runner.compiled.options)
        assert all(module.training for module in model.modules())
    finally:
        model.eval()
    assert {n: set(vars(m)) for n, m in model.named_modules()} == before
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert all(torch.equal(t, values[n]) for n, t in model.state_dict().items())


def test_a_model_without_attention_has_pages_that_hold_nothing() -> None:
    engine = make_engine(recurrent("mamba2"), num_pages=None)
    assert engine.runner.compiled.specs == () and engine.pool.nbytes == 0
    assert engine.kv.num_usable * engine.config.page_size >= 1 << 20


def test_a_model_with_attention_alone_has_no_state() -> None:
    engine = make_engine()
    assert engine.runner.recurrent == () and engine.state_pool is None and engine.kv.states.allocator is None and engine.kv.tree is not None


def test_in_float64_which_no_op_computes_each_layer_runs_its_own_forward() -> None:
    model = copy.deepcopy(recurrent("lfm2")).double()
    with LLM(model, page_size=4, num_pages=200, max_batch_tokens=16) as llm:
        assert not any(layer.ops for layer in llm.engine.runner.recurrent)
        assert "no backend computes" in llm.engine.runner.recurrent[0].why_no_ops
        assert [c.token_ids for c in llm.generate(PROMPTS[:4], GREEDY)] == [greedy(model, prompt, NEW) for prompt in PROMPTS[:4]]


@pytest.mark.parametrize(("name", "settings"), [(HYBRID, {"state_snapshots": 0}), ("mamba", OWN_FORWARD)])
def test_without_snapshots_no_prefix_is_reused(caplog: pytest.LogCaptureFixture, name: str, settings: dict[str, Any]) -> None:
    with caplog.at_level("INFO", "paged_attn"):
        llm = make_llm(recurrent(name), **settings)
    assert llm.engine.kv.tree is None and llm.engine.kv.states.snapshots is None
    assert llm.engine.state_pool is not None and llm.engine.state_pool.num_slots == llm.engine.config.max_requests + 1
    for _ in range(2):
        assert [(c.token_ids, c.cached_tokens) for c in llm.generate(PROMPTS[3:], GREEDY)] == [(t, 0) for t in expected(name)[3:]]
    assert sum("no prefix is reused" in record.message for record in caplog.records) == 1


def test_the_whole_public_road() -> None:
    """`make_llm` shares captures; here nothing is shared, and sampling settings other than greedy ones work."""
    model = recurrent("mamba")
    with LLM(model, max_batch_tokens=16, num_pages=64) as llm:
        assert [c.token_ids for c in llm.generate(PROMPTS[:3], GREEDY)] == expected("mamba")[:3]
        seeded = SamplingParams(max_new_tokens=6, temperature=1.0, seed=3)
        alone = llm.generate([PROMPTS[1]], seeded)[0].token_ids
        assert llm.generate([PROMPTS[2], PROMPTS[1]], seeded)[1].token_ids == alone
