"""Requests whose tokens the host chooses overlap, too: the model is launched first, and the choice when the tokens before it are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_attn import SamplingParams
from paged_attn.engine.engine import Engine
from paged_attn.engine.memory.request_states import RequestStates
from paged_attn.engine.output_processor import OutputProcessor
from paged_attn.engine.requests.request import Request
from paged_attn.engine.sampling.sampler import Sampler
from paged_attn.engine.sampling.sampler_output import SamplerOutput
from paged_attn.engine.steps.future_tokens import FutureTokens
from paged_attn.engine.steps.in_flight import InFlightStep
from tests.engine.models import assert_idle, fail_once, make_engine, oracle, random_prompts, run_all, run_past_errors, tokenizer

PROMPTS = random_prompts(0, 6, 19, 11)
GREEDY = SamplingParams(max_new_tokens=12)


def as_they_are(_: Tensor, scores: Tensor) -> Tensor:
    return scores


WATCHED = SamplingParams(max_new_tokens=12, logits_processors=(as_they_are,))
DRAWN = SamplingParams(max_new_tokens=12, temperature=3.0, seed=3, frequency_penalty=0.7, logits_processors=(as_they_are,))
GUIDES = (
    SamplingParams(max_new_tokens=24, regex="[a-c]{3,6}z?"),
    SamplingParams(max_new_tokens=24, json_schema='{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'),
    SamplingParams(max_new_tokens=9, regex="[0-9]+", temperature=0.9, seed=5),
)


def added(engine: Engine) -> list[Request]:
    """One that the host chooses for among others, one drawn with penalties by the host, and a plain one."""
    return [engine.add_request(p, params) for p, params in zip(PROMPTS, (WATCHED, DRAWN, GREEDY), strict=True)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    engine = make_engine(overlap=False)
    requests = added(engine)
    run_all(engine)
    tokens = [request.output_token_ids for request in requests]
    assert [tokens[0], tokens[2]] == [oracle(PROMPTS[0]), oracle(PROMPTS[2])]
    return tokens


def log_calls(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []

    def logged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            log.append(name)
            return function(*args)

        return called

    monkeypatch.setattr(engine.step_runner, "run", logged("launch", engine.step_runner.run))
    monkeypatch.setattr(SamplerOutput, "wait", logged("wait", SamplerOutput.wait))
    monkeypatch.setattr(Sampler, "choose", logged("choose", Sampler.choose))
    return log


def test_the_model_runs_while_the_host_waits_for_what_it_chooses_by(monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]) -> None:
    engine = make_engine(overlap=True)
    log = log_calls(engine, monkeypatch)
    requests = added(engine)
    run_all(engine)
    assert log == ["launch", "choose"] + ["launch", "wait", "choose"] * 11 + ["wait"]
    assert [request.output_token_ids for request in requests] == expected
    assert_idle(engine)


def test_a_step_without_such_a_request_chooses_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(overlap=True)
    engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=2, logits_processors=(as_they_are,)))
    engine.add_request(PROMPTS[1], SamplingParams(max_new_tokens=4))
    log = log_calls(engine, monkeypatch)
    run_all(engine)
    assert log == ["launch", "choose", "launch", "wait", "choose", *["launch", "choose", "wait"] * 2, "wait"]


@pytest.mark.parametrize("num_pages", [64, 14])
def test_guides_get_each_token_once_and_say_as_without_overlap(num_pages: int) -> None:
    """With few pages some are preempted, whose guides go on where they were."""
    outputs = []
    for overlap in (False, True):
        engine = make_engine(overlap=overlap, tokenizer=tokenizer(), num_pages=num_pages, page_size=4, max_batch_tokens=16)
        guided = [engine.add_request(p, params) for p, params in zip(PROMPTS, GUIDES, strict=True)]
        plain = engine.add_request(PROMPTS[0][::-1], SamplingParams(max_new_tokens=20))
        run_all(engine)
        assert (num_pages == 14) == (engine.scheduler.stats.preemptions > 0)
        outputs.append([(request.output_token_ids, str(request.finish_reason)) for request in (*guided, plain)])
        assert_idle(engine)
    assert outputs[0] == outputs[1]
    assert outputs[0][3][0] == oracle(PROMPTS[0][::-1], 20)
    assert {reason for _, reason in outputs[0][:2]} == {"stop"} and len(outputs[0][0][0]) < 24


@pytest.mark.parametrize("what", ["launch", "begin", "keep", "wait", "choose", "store"])
@pytest.mark.parametrize("at_call", (1, 2, 3, 7, 12))
def test_what_fails_once_is_done_again(what: str, at_call: int, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]) -> None:
    engine = make_engine(overlap=True)
    requests = added(engine)
    if what == "launch":
        fail_once(engine, RuntimeError("once"), at_call)
    else:
        owners = {"begin": InFlightStep, "keep": RequestStates, "wait": SamplerOutput, "choose": Sampler, "store": FutureTokens}
        owner: Any = owners[what]
        function, calls = getattr(owner, what), iter(range(1, 10**6))

        def failing(*args: Any) -> Any:
            if next(calls) == at_call:
                raise RuntimeError("once")
            return function(*args)

        monkeypatch.setattr(owner, what, failing)
    events, raised = run_past_errors(engine)
    assert raised == 1 and [request.output_token_ids for request in requests] == expected
    assert [[e.token_id for e in events if e.request_id == request.id] for request in requests] == expected
    assert_idle(engine)


@pytest.mark.parametrize(("what", "hit"), [("wait", [0, 1]), ("choose", [0])])
def test_who_was_in_the_step_that_failed_is_known(what: str, hit: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step is launched without a request whose last token the second one chose; then that one's tokens are waited for."""
    engine = make_engine(overlap=True)
    requests = [engine.add_request(PROMPTS[0], WATCHED), engine.add_request(PROMPTS[1], SamplingParams(max_new_tokens=2))]
    owner: Any = SamplerOutput if what == "wait" else Sampler
    function = getattr(owner, what)

    def failing(*args: Any) -> Any:
        if engine.stats.steps == 2:
            raise RuntimeError("once")
        return function(*args)

    engine.step()
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(owner, what, failing)
        with pytest.raises(RuntimeError, match="once"):
            engine.step()
    assert [requests.index(request) for request in engine.last_scheduled] == hit
    run_all(engine)
    assert [request.output_token_ids for request in requests] == [oracle(PROMPTS[0]), oracle(PROMPTS[1], 2)]
    assert_idle(engine)


@pytest.mark.parametrize("after", range(1, 6))
def test_one_that_is_cancelled_leaves_the_others(after: int, expected: list[list[int]]) -> None:
    engine = make_engine(overlap=True)
    requests = added(engine)
    for _ in range(after):
        engine.step()
    known = list(requests[1].output_token_ids)
    assert engine.cancel(requests[1].id)
    run_all(engine)
    assert [request.output_token_ids for request in requests] == [expected[0], known, expected[2]] and known == expected[1][: len(known)]
    assert_idle(engine)


def test_when_the_tokens_before_end_all_requests_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(overlap=True, tokenizer=tokenizer())
    answer = oracle(PROMPTS[0])
    params = SamplingParams(max_new_tokens=12, stop_token_ids=(answer[2],), logits_processors=(as_they_are,))
    log = log_calls(engine, monkeypatch)
    request = engine.add_request(PROMPTS[0], params)
    run_all(engine)
    assert request.output_token_ids == answer[: answer.index(answer[2]) + 1] and str(request.finish_reason) == "stop"
    assert log.count("launch") == len(request.output_token_ids) + 1 and log[-2:] == ["launch", "wait"]
    assert_idle(engine)


@pytest.mark.parametrize(("max_requests", "later"), [(1, 0), (4, 1)], ids=["it waits", "it is in the middle of its prompt"])
def test_when_they_end_all_that_have_a_token_to_come_others_go_on(max_requests: int, later: int) -> None:
    """The tokens before end the only request that the step chooses for."""
    engine = make_engine(overlap=True, tokenizer=tokenizer(), max_requests=max_requests, max_batch_tokens=8)
    guided = engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=9, regex="[a-c]"))
    for _ in range(later):
        engine.step()
    other = engine.add_request(PROMPTS[1], GREEDY)
    run_all(engine)
    assert len(guided.output_token_ids) == 1 and str(guided.finish_reason) == "stop"
    assert other.output_token_ids == oracle(PROMPTS[1])
    assert_idle(engine)


def test_what_fails_while_tokens_are_processed_takes_the_launched_step_back(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    """No tokens are chosen for it yet."""
    engine = make_engine(overlap=True)
    requests = added(engine)
    process, calls = OutputProcessor.process, iter(range(1, 10**6))

    def failing(*args: Any) -> None:
        if next(calls) == 3:
            raise RuntimeError("once")
        process(*args)

    monkeypatch.setattr(OutputProcessor, "process", failing)
    _, raised = run_past_errors(engine)
    assert raised == 1 and [request.output_token_ids for request in requests] == expected
    assert_idle(engine)


def test_a_processor_that_raises_ends_its_own_request() -> None:
    def raising(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == len(PROMPTS[0]) + 3:
            raise IndexError("mine")
        return torch.log_softmax(scores, -1)

    engine = make_engine(overlap=True)
    request = engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=12, logits_processors=(raising,)))
    other = engine.add_request(PROMPTS[1], WATCHED)
    run_all(engine)
    assert request.output_token_ids == oracle(PROMPTS[0])[:3] and "mine" in str(request.error)
    assert other.output_token_ids == oracle(PROMPTS[1])
    assert_idle(engine)
