"""A step is launched before the tokens of the one before it are known, and nobody can tell from what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from paged_attn import SamplingParams
from paged_attn.engine.engine import Engine
from paged_attn.engine.sampling.sampler_output import SamplerOutput
from paged_attn.engine.steps.future_tokens import FutureTokens
from paged_attn.engine.steps.step_runner import StepOutput
from tests.engine.models import (
    POISON,
    assert_idle,
    fail_once,
    make_engine,
    oracle,
    poisoned,
    random_prompts,
    run_all,
    run_past_errors,
    tokenizer,
)  # fmt: skip

PROMPTS = random_prompts(0, 6, 19, 11)
GREEDY = SamplingParams(max_new_tokens=12)


def overlapped(**settings: Any) -> Engine:
    return make_engine(overlap=True, **settings)


def log_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Writes down when steps are launched and when their tokens are waited for."""
    log: list[str] = []
    run, wait = engine.step_runner.run, SamplerOutput.wait

    def running(*args: Any) -> Any:
        log.append("launch")
        return run(*args)

    def waiting(self: SamplerOutput) -> Any:
        log.append("wait")
        return wait(self)

    engine.step_runner.run = running  # type: ignore[method-assign]
    monkeypatch.setattr(SamplerOutput, "wait", waiting)
    return log


def test_each_step_is_launched_before_the_one_before_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = overlapped()
    log = log_of(engine, monkeypatch)
    requests = [engine.add_request(p, GREEDY) for p in PROMPTS]
    counts = []
    while engine.has_work:
        counts.append(len(engine.step()))
    assert log == ["launch"] + ["launch", "wait"] * 11 + ["wait"]
    assert counts == [0] + [3] * 12
    assert [r.output_token_ids for r in requests] == [oracle(p) for p in PROMPTS]
    assert engine.stats.steps == 12, "no step beyond the last token"
    assert_idle(engine)


def test_without_overlap_each_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(overlap=False)
    log = log_of(engine, monkeypatch)
    engine.add_request(PROMPTS[0], GREEDY)
    run_all(engine)
    assert log == ["launch", "wait"] * 12


def test_the_host_never_gave_the_tokens_that_the_device_used() -> None:
    """Decode steps take their input from the feed: with other numbers in it they would say something else."""
    engine = overlapped()
    request = engine.add_request(PROMPTS[0], GREEDY)
    engine.step()
    engine.step_runner.future_tokens.tokens.fill_(5)
    run_all(engine)
    first = oracle(PROMPTS[0])[0]
    assert request.output_token_ids[0] == first != 5
    assert request.output_token_ids[1] == oracle([*PROMPTS[0], 5])[0] != oracle(PROMPTS[0])[1]


@pytest.mark.parametrize("kind", ["token", "string"])
def test_a_stop_is_seen_a_step_late_and_emits_nothing_more(kind: str) -> None:
    engine = overlapped(tokenizer=tokenizer())
    answer = oracle(PROMPTS[1])
    stops = {"stop_token_ids": (answer[4],)} if kind == "token" else {"stop": (tokenizer().decode(answer[4:5]),)}
    request = engine.add_request(PROMPTS[1], SamplingParams(max_new_tokens=12, **stops))
    beside = engine.add_request(PROMPTS[0], GREEDY)
    end = answer.index(answer[4]) + 1
    events = run_all(engine)
    mine = [e for e in events if e.request_id == request.id]
    assert [e.token_id for e in mine] == answer[:end] == request.output_token_ids
    assert [e.finish_reason for e in mine] == [None] * (end - 1) + ["stop"]
    assert beside.output_token_ids == oracle(PROMPTS[0])
    assert_idle(engine)


def test_pages_of_a_stopped_request_are_given_away_while_its_last_step_runs() -> None:
    answer = oracle(PROMPTS[1])
    engine = overlapped(num_pages=8, page_size=4, max_requests=1, prefix_cache=False)
    end = answer.index(answer[2]) + 1
    requests = [engine.add_request(PROMPTS[1], SamplingParams(max_new_tokens=8, stop_token_ids=(answer[2],))) for _ in range(3)]
    run_all(engine)
    assert [r.output_token_ids for r in requests] == [answer[:end]] * 3
    assert_idle(engine)


@pytest.mark.parametrize("after", range(1, 8))
def test_cancelling_what_is_under_way(after: int) -> None:
    engine = overlapped(max_batch_tokens=8)
    requests = [engine.add_request(p, GREEDY) for p in PROMPTS]
    events = []
    for _ in range(after):
        events += engine.step()
    known = len(requests[1].output_token_ids)
    assert engine.cancel(requests[1].id)
    events += run_all(engine)
    assert requests[1].output_token_ids == oracle(PROMPTS[1])[:known]
    assert [e.token_id for e in events if e.request_id == requests[1].id] == oracle(PROMPTS[1])[:known]
    assert [requests[i].output_token_ids for i in (0, 2)] == [oracle(PROMPTS[i]) for i in (0, 2)]
    again = engine.add_request(PROMPTS[1], GREEDY, request_id=requests[1].id)
    run_all(engine)
    assert again.output_token_ids == oracle(PROMPTS[1])
    assert_idle(engine)


def test_when_all_are_gone_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = overlapped()
    log = log_of(engine, monkeypatch)
    request = engine.add_request(PROMPTS[0], GREEDY)
    for _ in range(3):
        engine.step()
    engine.cancel(request.id)
    assert not engine.has_work and engine.step() == [] and log.count("wait") == 2
    assert not engine._in_flight


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_waits_for_what_is_under_way(prefix_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = overlapped(num_pages=14, page_size=4, prefix_cache=prefix_cache)
    preempt = engine.scheduler.preempt

    def preempting(request: Any) -> None:
        assert not engine._in_flight and not request.num_pending
        preempt(request)

    monkeypatch.setattr(engine.scheduler, "preempt", preempting)
    requests = [engine.add_request(p, GREEDY) for p in PROMPTS]
    run_all(engine)
    assert engine.scheduler.stats.preemptions > 0
    assert [r.output_token_ids for r in requests] == [oracle(p) for p in PROMPTS]
    assert_idle(engine)


@pytest.mark.parametrize("at_call", range(1, 12))
def test_a_launch_that_fails_loses_no_token_of_the_step_before(at_call: int) -> None:
    engine = overlapped(max_batch_tokens=16)
    requests = [
        engine.add_request(p, SamplingParams(max_new_tokens=12, temperature=t, seed=1)) for p, t in zip(PROMPTS, (0, 0, 1), strict=True)
    ]
    fail_once(engine, RuntimeError("once"), at_call)
    events, raised = run_past_errors(engine)
    (seeded,) = [engine.add_request(PROMPTS[2], SamplingParams(max_new_tokens=12, temperature=1, seed=1))]
    run_all(engine)
    expected = [oracle(PROMPTS[0]), oracle(PROMPTS[1]), seeded.output_token_ids]
    assert raised == 1 and [r.output_token_ids for r in requests] == expected
    assert [[e.token_id for e in events if e.request_id == r.id] for r in requests] == expected
    assert_idle(engine)


@pytest.mark.parametrize("at_call", (1, 3))
def test_a_launch_that_fails_once_tokens_were_chosen_changes_none(at_call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, calls = FutureTokens.store, iter(range(1, 10**6))

    def failing(self: FutureTokens, tokens: Tensor) -> None:
        if next(calls) == at_call:
            raise RuntimeError("no room for them")
        store(self, tokens)

    drawn = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)
    monkeypatch.setattr(FutureTokens, "store", failing)
    engine = overlapped(max_batch_tokens=16)
    request = engine.add_request(PROMPTS[0], drawn)
    _, raised = run_past_errors(engine)
    again = engine.add_request(PROMPTS[0], drawn)
    run_all(engine)
    assert raised == 1 and request.output_token_ids == again.output_token_ids


@pytest.mark.parametrize("at_call", range(1, 14))
def test_tokens_that_do_not_come_are_computed_again(at_call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while waiting takes back that step and the one launched after it."""
    engine = overlapped(max_batch_tokens=16)
    penalised = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, frequency_penalty=0.7)
    requests = [engine.add_request(p, params) for p, params in zip(PROMPTS, (GREEDY, GREEDY, penalised), strict=True)]
    wait, calls = SamplerOutput.wait, iter(range(1, 10**6))

    def failing(self: SamplerOutput) -> Any:
        if next(calls) == at_call:
            raise RuntimeError("the device is gone")
        return wait(self)

    monkeypatch.setattr(SamplerOutput, "wait", failing)
    events, raised = run_past_errors(engine)
    alone = make_engine(overlap=False)
    reference = alone.add_request(PROMPTS[2], penalised)
    monkeypatch.setattr(SamplerOutput, "wait", wait)
    run_all(alone)
    expected = [oracle(PROMPTS[0]), oracle(PROMPTS[1]), reference.output_token_ids]
    assert raised == 1 and [r.output_token_ids for r in requests] == expected
    assert [[e.token_id for e in events if e.request_id == r.id] for r in requests] == expected
    assert_idle(engine)


def test_logits_that_are_not_finite_end_one_request_and_leave_nothing_in_the_cache() -> None:
    engine = overlapped()
    run, answer = engine.step_runner.run, oracle(PROMPTS[1])
    request, other = engine.add_request(PROMPTS[1], GREEDY), engine.add_request(PROMPTS[0], GREEDY)
    for _ in range(4):
        engine.step()

    def spoilt(*args: Any) -> StepOutput:
        output = run(*args)
        logits, tokens = output.logits.clone(), output.greedy_tokens.clone()
        logits[0], tokens[0] = float("inf"), -1
        return StepOutput(logits, tokens)

    engine.step_runner.run = spoilt  # type: ignore[method-assign]
    events = engine.step()
    engine.step_runner.run = run  # type: ignore[method-assign]
    events += run_all(engine)
    assert request.finish_reason == "error" and request.output_token_ids == answer[:4]
    assert [e.token_id for e in events if e.request_id == request.id] == [answer[3], None]
    assert other.output_token_ids == oracle(PROMPTS[0])
    assert engine.kv.tree is not None and engine.kv.tree.match(PROMPTS[1], None).num_tokens == len(PROMPTS[1]) // 4 * 4
    assert_idle(engine)


def test_poisoned_requests_among_others() -> None:
    engine = overlapped(max_batch_tokens=8)
    with poisoned():
        good = [engine.add_request(p, GREEDY) for p in PROMPTS]
        bad = [engine.add_request([*p, POISON], GREEDY) for p in PROMPTS]
        run_all(engine)
    assert [r.output_token_ids for r in good] == [oracle(p) for p in PROMPTS]
    assert [str(r.finish_reason) for r in bad] == ["error"] * 3
    assert_idle(engine)


def test_a_logits_processor_sees_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = overlapped()
    log = log_of(engine, monkeypatch)
    lengths: list[int] = []

    def watch(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        lengths.append(input_ids.shape[1])
        return scores

    params = SamplingParams(max_new_tokens=12, logits_processors=(NoRepeatNGramLogitsProcessor(1), watch))
    request, other = engine.add_request(PROMPTS[1], params), engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=20))
    run_all(engine)
    assert lengths == list(range(19, 31)) and log == ["launch"] + ["launch", "wait"] * 19 + ["wait"]
    assert request.output_token_ids == oracle(PROMPTS[1], no_repeat_ngram_size=1)
    assert other.output_token_ids == oracle(PROMPTS[0], 20)


def test_penalties_logprobs_and_seeds_come_out_as_without_overlap() -> None:
    settings = [
        {"temperature": 0.8, "seed": 1, "top_p": 0.9, "logprobs": 2},
        {"repetition_penalty": 1.4, "logprobs": 0},
        {"temperature": 1.3, "seed": 2, "frequency_penalty": 0.6, "presence_penalty": 0.2, "min_p": 0.01},
    ]
    outputs = []
    for overlap in (False, True):
        engine = make_engine(overlap=overlap, num_pages=20, max_batch_tokens=16)
        requests = [engine.add_request(p, SamplingParams(max_new_tokens=16, **s)) for p, s in zip(PROMPTS, settings, strict=True)]
        run_all(engine)
        assert engine.scheduler.stats.preemptions > 0
        outputs.append([r.output_token_ids for r in requests])
        logprobs = requests[0].logprobs[3].top_logprobs
        assert logprobs is not None and len(logprobs) == 2 and requests[1].logprobs[2].logprob is not None
    assert outputs[0] == outputs[1]
    assert outputs[0][1] == oracle(PROMPTS[1], 16, repetition_penalty=1.4)


def test_has_work_until_the_last_event_was_told() -> None:
    engine = overlapped()
    nothing = engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=0))
    assert engine.has_work and [(e.request_id, e.finish_reason) for e in engine.step()] == [(nothing.id, "length")]
    assert not engine.has_work and engine.step() == []
