"""Exceptions in the middle of a step, and logits that are not finite: nothing is lost, and the engine goes on."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from paged_attn import LLM, SamplingParams
from paged_attn.engine.engine import Engine
from paged_attn.engine.sampling.structured.guides import GuideError
from paged_attn.engine.steps.in_flight import InFlightStep
from paged_attn.engine.steps.step_runner import StepOutput
from tests.engine.models import (
    POISON,
    assert_idle,
    assert_nothing_left,
    fail_once,
    make_engine,
    make_llm,
    oracle,
    poisoned,
    random_prompts,
    run_all,
    run_past_errors,
    tiny,
    tokenizer,
)  # fmt: skip

PROMPTS = random_prompts(0, 6, 19, 11)
GREEDY = SamplingParams(max_new_tokens=12)
ERRORS = [RuntimeError("out of memory"), ValueError("bad"), KeyboardInterrupt(), SystemExit(3)]


def assert_usable(llm: LLM) -> None:
    assert_nothing_left(llm)
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [oracle(p) for p in PROMPTS]
    assert_nothing_left(llm)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("at_call", [1, 3, 6, 10])
def test_an_exception_inside_the_model_ends_the_call_and_leaves_nothing_behind(error: BaseException, at_call: int) -> None:
    llm = make_llm(max_batch_tokens=8)
    fail_once(llm.engine, error, at_call)
    with pytest.raises(type(error)) as raised:
        llm.generate(PROMPTS, GREEDY)
    assert raised.value is error
    assert_idle(llm.engine)
    assert_usable(llm)


@pytest.mark.parametrize("at_call", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("num_pages", [100, 12])
def test_an_engine_can_step_on_after_an_exception(at_call: int, num_pages: int) -> None:
    engine = make_engine(max_batch_tokens=8, num_pages=num_pages)
    requests = [
        engine.add_request(p, SamplingParams(max_new_tokens=12, temperature=t, seed=1)) for p, t in zip(PROMPTS, (0, 0, 1), strict=True)
    ]
    fail_once(engine, RuntimeError("once"), at_call)
    events, raised = run_past_errors(engine)
    assert raised == 1
    (seeded,) = make_llm().generate(PROMPTS[2], SamplingParams(max_new_tokens=12, temperature=1, seed=1))
    expected = [oracle(PROMPTS[0]), oracle(PROMPTS[1]), seeded.token_ids]
    assert [r.output_token_ids for r in requests] == expected
    assert [[e.token_id for e in events if e.request_id == r.id] for r in requests] == expected
    assert_idle(engine)


def test_requests_of_others_survive_the_exception_of_one_call() -> None:
    llm = make_llm(max_batch_tokens=8)
    stream = llm.stream(PROMPTS[1], GREEDY)
    got = [next(stream).token_id for _ in range(2)]
    fail_once(llm.engine, RuntimeError("once"), 2)
    with pytest.raises(RuntimeError, match="once"):
        llm.generate(PROMPTS[0], GREEDY)
    assert got + [event.token_id for event in stream] == oracle(PROMPTS[1])
    assert_usable(llm)


def test_events_without_a_token_survive_an_exception() -> None:
    engine = make_engine()
    nothing = engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=0))
    engine.add_request(PROMPTS[1], GREEDY)
    fail_once(engine, RuntimeError("once"))
    events = []
    while engine.has_work:
        try:
            events += engine.step()
        except RuntimeError:
            pass
    assert [(e.token_id, e.finish_reason) for e in events if e.request_id == nothing.id] == [(None, "length")]


class BrokenTokenizer:
    """Fails for one token, as some do for ids beyond their own vocabulary."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        if self.bad in ids:
            raise IndexError("piece id is out of range")
        return tokenizer().decode(ids)


@pytest.mark.parametrize("text_at_end", [False, True])
def test_an_id_that_the_tokenizer_does_not_decode_ends_its_request_and_no_other(text_at_end: bool) -> None:
    """`generate` decodes an answer when it ends, a stream each token."""
    answer = oracle(PROMPTS[0])
    prompt = next(p for p in random_prompts(8, *range(4, 12)) if answer[2] not in oracle(p))
    engine = make_engine(tokenizer=BrokenTokenizer(answer[2]))
    failing = engine.add_request(PROMPTS[0], GREEDY, request_id="bad one", text_at_end=text_at_end)
    other = engine.add_request(prompt, GREEDY, text_at_end=text_at_end)
    events = run_all(engine)
    assert (other.output_token_ids, other.detokenizer.text) == (oracle(prompt), tokenizer().decode(oracle(prompt)))
    assert failing.output_token_ids == (answer if text_at_end else answer[: answer.index(answer[2]) + 1])
    assert [e.finish_reason for e in events if e.request_id == "bad one"][-1] == failing.finish_reason == "error"
    assert "its tokenizer does not decode what the model chose (IndexError: piece id is out of range)" in str(failing.error)
    assert_idle(engine)


@pytest.mark.parametrize("max_batch_tokens", [4, 2048])
def test_not_finite_logits_end_their_request_and_no_other(max_batch_tokens: int) -> None:
    engine = make_engine(max_batch_tokens=max_batch_tokens)
    with poisoned():
        good = [engine.add_request(PROMPTS[0], GREEDY), engine.add_request(PROMPTS[1], GREEDY)]
        bad = engine.add_request([*PROMPTS[2], POISON, 4, 5], GREEDY, request_id="bad one")
        late = engine.add_request(PROMPTS[2], GREEDY)
        events = run_all(engine)
    assert [r.output_token_ids for r in (*good, late)] == [oracle(p) for p in PROMPTS]
    assert (bad.finish_reason, bad.output_token_ids) == ("error", [])
    assert "NaN or infinite logits for request 'bad one' after 0 new tokens" in str(bad.error)
    assert [(e.token_id, e.finish_reason) for e in events if e.request_id == "bad one"] == [(None, "error")]
    assert_idle(engine)


class OfACaller(Exception):
    pass


@pytest.mark.parametrize("kind", [KeyError, ConnectionError, StopIteration, OfACaller])
def test_what_a_logits_processor_raises_ends_its_request_and_no_other(kind: type[Exception]) -> None:
    def raising(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 8:
            raise kind("nothing is known of so many")
        return scores

    engine = make_engine()
    good = engine.add_request(PROMPTS[0], GREEDY)
    bad = engine.add_request(PROMPTS[0], replace(GREEDY, logits_processors=(raising,)), request_id="bad one")
    also_good = engine.add_request(PROMPTS[2], GREEDY)
    run_all(engine)
    assert [good.output_token_ids, also_good.output_token_ids] == [oracle(PROMPTS[0]), oracle(PROMPTS[2])]
    assert bad.finish_reason == "error" and bad.output_token_ids == oracle(PROMPTS[0])[:3]
    said = rf"'bad one' ended after 3 new tokens, others go on: the logits processor .*raising.* raised {kind.__name__}"
    assert re.search(said, str(bad.error))
    assert isinstance(bad.error.__cause__.__cause__, kind)
    assert_idle(engine)


def test_an_engine_that_is_asked_from_within_its_own_step_says_so_and_goes_on() -> None:
    llm = make_llm()

    def asking(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        llm.generate([PROMPTS[1]], GREEDY)
        return scores

    params = [GREEDY, replace(GREEDY, logits_processors=(asking,)), GREEDY]
    with pytest.raises(
        ValueError, match="generates with the engine that is calling it, in the middle of a step; let it use the model's own"
    ):
        llm.generate(PROMPTS, params)
    assert_usable(llm)


def test_a_stream_that_is_let_go_of_within_a_step_ends_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector of garbage closes it wherever it happens to run."""
    llm = make_llm()
    abandoned = [llm.stream(PROMPTS[2], GREEDY), llm.stream(PROMPTS[0], GREEDY)]
    for each in abandoned:
        next(each)
    reserve = llm.engine.kv.reserve

    def reserving(*args: object) -> object:
        if abandoned:
            abandoned.pop().close()
        return reserve(*args)

    monkeypatch.setattr(llm.engine.kv, "reserve", reserving)
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [oracle(p) for p in PROMPTS]
    assert not abandoned
    assert_usable(llm)


def test_an_answer_for_which_bad_words_leave_nothing_says_so() -> None:
    engine = make_engine(tokenizer=tokenizer())
    request = engine.add_request(PROMPTS[0], replace(GREEDY, regex="ab", bad_words=((tokenizer().encode("b")[0],),)))
    run_all(engine)
    assert request.finish_reason == "error" and isinstance(request.error, GuideError)
    assert "its own bad_words, regex left no token" in str(request.error)


def test_generate_raises_for_not_finite_logits_and_names_the_request() -> None:
    llm = make_llm()
    with poisoned():
        with pytest.raises(ValueError, match="NaN or infinite logits for request 'request-1'"):
            llm.generate([PROMPTS[0], [*PROMPTS[1], POISON], PROMPTS[2]], GREEDY)
        assert_idle(llm.engine)
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [oracle(p) for p in PROMPTS], "on the pages that held NaN"
    assert_usable(llm)


def test_a_stream_yields_what_it_has_and_then_raises() -> None:
    llm = make_llm(max_requests=2)
    seen = []
    with poisoned(), pytest.raises(ValueError, match="NaN or infinite"):
        for event in llm.stream([PROMPTS[0], PROMPTS[1], [1, POISON]], GREEDY):
            seen.append(event)
    assert [e.token_id for e in seen if e.index == 0] == oracle(PROMPTS[0])
    assert_usable(llm)


@pytest.mark.parametrize("max_batch_tokens", [5, 2048])
def test_poisoned_pages_do_not_stay_in_the_prefix_cache(max_batch_tokens: int) -> None:
    llm = make_llm(max_batch_tokens=max_batch_tokens, num_pages=20)
    prompt = [*random_prompts(1, 10)[0], POISON, *random_prompts(2, 9)[0]]
    with poisoned(), pytest.raises(ValueError, match="NaN or infinite"):
        llm.generate(prompt, GREEDY)
    assert llm.engine.kv.tree is not None and llm.engine.kv.tree.num_pages == 0
    (healed,) = llm.generate(prompt, GREEDY)
    assert (healed.cached_tokens, healed.token_ids) == (0, oracle(prompt))


def test_nan_in_the_middle_of_an_answer_keeps_the_healthy_prefix_only() -> None:
    engine = make_engine(overlap=False)
    run, answer = engine.step_runner.run, oracle(PROMPTS[1])
    request = engine.add_request(PROMPTS[1], GREEDY)
    for _ in range(7):
        engine.step()
    engine.step_runner.run = lambda *args: StepOutput(torch.full_like(run(*args).logits, float("inf")), None)  # type: ignore[method-assign]
    engine.step()
    engine.step_runner.run = run  # type: ignore[method-assign]
    assert (request.finish_reason, request.output_token_ids) == ("error", answer[:7])
    assert_idle(engine)
    assert engine.kv.tree is not None and engine.kv.tree.num_pages == len(PROMPTS[1]) // 4, "what the first good logits vouched for"
    again = engine.add_request(PROMPTS[1], GREEDY)
    run_all(engine)
    assert again.output_token_ids == answer


def _end_elsewhere(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are run to their end, as by another thread, between being queued and being waited for."""
    add = llm._add

    def added(*args, **settings):
        requests = add(*args, **settings)
        while any(r.finish_reason is None for r in requests):
            llm._step()
        return requests

    monkeypatch.setattr(llm, "_add", added)


def test_an_error_that_another_threads_step_found_is_raised_too(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    _end_elsewhere(llm, monkeypatch)
    with poisoned(), pytest.raises(ValueError, match="NaN or infinite"):
        llm.generate([1, POISON], GREEDY)
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [oracle(p) for p in PROMPTS]
    assert_nothing_left(llm)


def test_a_broken_model_does_not_poison_the_next_engine() -> None:
    with poisoned(), pytest.raises(ValueError, match="NaN or infinite"):
        make_llm().generate([POISON], GREEDY)
    engine: Engine = make_engine(tiny())
    request = engine.add_request([POISON], GREEDY)
    run_all(engine)
    assert request.output_token_ids == oracle([POISON])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at_call", [1, 2, 4])
def test_no_token_is_wrong_after_a_launch_that_was_not_counted(monkeypatch: pytest.MonkeyPatch, overlap: bool, at_call: int) -> None:
    """The model has run, and there is no memory for what counts the step: it did not happen."""
    engine = make_engine(max_batch_tokens=8, overlap=overlap)
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    begin, calls = InFlightStep.begin, iter(range(1, 10**9))

    def failing(step: InFlightStep) -> InFlightStep:
        if next(calls) == at_call:
            raise RuntimeError("no memory")
        return begin(step)

    monkeypatch.setattr(InFlightStep, "begin", failing)
    _, raised = run_past_errors(engine)
    assert raised == 1 and [r.output_token_ids for r in requests] == [oracle(p) for p in PROMPTS]
    assert_idle(engine)
