"""Scored and ordinary requests that share prefixes, come and go, lose their pages, and see steps fail: every number is the model's own."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from paged_attn import SamplingParams
from paged_attn.engine.engine import Engine
from paged_attn.engine.requests.request import Request
from tests.engine.models import assert_idle, make_engine, oracle, random_prompts, tiny
from tests.recurrent_models import recurrent

STEMS = random_prompts(21, 12, 20, 33)
SETTINGS: dict[str, dict[str, Any]] = {
    "few pages": {"num_pages": 18},
    "few pages, overlap": {"num_pages": 18, "overlap": True},
    "longest prefix first": {"num_pages": 60, "policy": "lpm", "overlap": True},
    "waiting for prefixes": {"num_pages": 60, "prefix_wait_tokens": 4, "overlap": True},
    "no prefix cache": {"num_pages": 40, "prefix_cache": False},
}


@functools.cache
def own_scores(name: str, prompt: tuple[int, ...]) -> list[list[float]]:
    model = recurrent(name) if name == "falcon_h1" else tiny(name)
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0].float().log_softmax(-1).tolist()


def wanted(rng: random.Random) -> tuple[list[int], SamplingParams]:
    stem = rng.choice(STEMS)
    prompt = stem[: rng.randint(1, len(stem))] + random_prompts(rng.randrange(6), rng.randint(0, 9))[0]
    if rng.random() < 0.4:
        return prompt, SamplingParams(max_new_tokens=rng.randint(1, 9))
    start = rng.choice((0, 0, len(prompt) // 2, len(prompt) - 1, len(prompt)))
    return prompt, SamplingParams(max_new_tokens=rng.choice((0, 0, 1, 6)), prompt_logprobs=rng.choice((0, 1)), prompt_logprobs_start=start)


def check(name: str, request: Request) -> None:
    completion, params = request.completion(), request.params
    prompt, scores = completion.prompt_token_ids, completion.prompt_logprobs
    model = recurrent(name) if name == "falcon_h1" else tiny(name)
    assert completion.token_ids == (oracle(prompt, params.max_new_tokens, model) if params.max_new_tokens else [])
    if params.prompt_logprobs is None:
        assert scores is None
        return
    assert scores is not None and len(scores) == len(prompt)
    for place, (token, got) in enumerate(zip(prompt, scores, strict=True)):
        if place < max(params.prompt_logprobs_start, 1):
            assert got is None
            continue
        row = own_scores(name, tuple(prompt))[place - 1]
        assert got is not None and got[token] == pytest.approx(row[token], abs=1e-4) and len(got) <= params.prompt_logprobs + 1


def drive(engine: Engine, rng: random.Random, fail_every: int) -> list[Request]:
    """Add, cancel and step at random; those that were not cancelled."""
    run, calls, requests = engine.step_runner.run, iter(range(1, 10**9)), []

    def failing(*args: Any) -> Any:
        output = run(*args)
        if next(calls) % fail_every == 0:
            raise RuntimeError("out of memory")
        return output

    engine.step_runner.run = failing  # type: ignore[method-assign]
    while len(requests) < 40 or engine.has_work:
        if len(requests) < 40 and rng.random() < 0.6:
            prompt, params = wanted(rng)
            requests.append(engine.add_request(prompt, params, priority=rng.choice((0, 0, 1))))
        if rng.random() < 0.05 and engine.requests:
            engine.cancel(rng.choice(sorted(engine.requests)))
        try:
            engine.step()
        except RuntimeError as error:
            assert str(error) == "out of memory"
    return [request for request in requests if request.finish_reason != "cancelled"]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_number_is_the_models_own(name: str, seed: int) -> None:
    engine = make_engine(max_batch_tokens=16, max_requests=6, **SETTINGS[name])
    engine.scheduler.score_rows = 9
    done = drive(engine, random.Random(seed), fail_every=17)
    for request in done:
        check("qwen3", request)
    assert len(done) > 30 and (engine.stats.cached_tokens > 0) == (name != "no prefix cache")
    assert engine.scheduler.stats.preemptions > 0 or "few pages" not in name
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_so_it_is_with_recurrent_states(overlap: bool) -> None:
    engine = make_engine(recurrent("falcon_h1"), max_batch_tokens=16, max_requests=6, num_pages=60, overlap=overlap)
    engine.scheduler.score_rows = 9
    for request in drive(engine, random.Random(3), fail_every=17):
        check("falcon_h1", request)
    assert_idle(engine)
