"""Thousands of steps of everything at once, the same ones every time: afterwards nothing is left, and nobody got a wrong token."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from paged_attn import SamplingParams
from paged_attn.engine.engine import Engine
from paged_attn.engine.request import Request
from tests.engine.models import POISON, assert_idle, fail_once, make_engine, oracle, poisoned, random_prompts, tokenizer
from tests.tiny_models import VOCAB

TURNS = 1200  # per setting; some five seconds on one core
NEW = 24
BAD: list[tuple[Any, SamplingParams]] = [
    ([], SamplingParams()),
    ([VOCAB], SamplingParams()),
    ([1, -1], SamplingParams()),
    ([1] * 300, SamplingParams()),
    (["a"], SamplingParams()),
    ([1] * 100, SamplingParams(max_new_tokens=100)),
]


@dataclass
class Expected:
    """What a request must have said in the end; `cut` if it may have said less of it."""

    tokens: list[int]
    text: str
    reason: str
    cut: bool = False
    events: str = ""


def prompts() -> list[list[int]]:
    """Trees of shared prefixes, and prompts of their own; none is answered with POISON."""
    stems = random_prompts(1, 16, 9, 25)
    tails = random_prompts(2, *[1 + n % 12 for n in range(12)])
    shared = [stems[i % 3] + tail for i, tail in enumerate(tails)]
    table = [*shared, *stems, *[stem[:5] for stem in stems], *random_prompts(3, 1, 2, 30, 41, 7, 16)]
    return [prompt for prompt in table if POISON not in oracle(prompt, NEW)]


def expectation(rng: random.Random, prompt: list[int]) -> tuple[SamplingParams, Expected]:
    said = oracle(prompt, NEW)
    text = tokenizer().decode(said)
    new = rng.choice([0, 1, 2, 7, NEW])
    kind = rng.choice(["length", "length", "stop", "token"])
    at = rng.randrange(NEW - 3)
    stop, token = text[at : at + rng.randint(1, 3)], said[at]
    end = {"length": NEW, "stop": text.index(stop) + len(stop), "token": said.index(token) + 1}[kind]
    stops = {"length": {}, "stop": {"stop": (stop,)}, "token": {"stop_token_ids": (token,)}}[kind]
    params = SamplingParams(max_new_tokens=new, logprobs=rng.choice([None, 2]), **stops)
    if kind == "length" or end > new:
        return params, Expected(said[:new], text[:new], "length")
    return params, Expected(said[:end], text[: end - len(stop) if kind == "stop" else end], "stop")


def verify(request: Request, expected: Expected) -> None:
    if expected.cut:
        assert request.finish_reason in ("cancelled", expected.reason)
        assert request.output_token_ids == expected.tokens[: len(request.output_token_ids)]
        assert expected.text.startswith(request.detokenizer.text[: len(expected.text)])
    elif expected.reason == "error":
        assert (request.finish_reason, request.output_token_ids) == ("error", []) and "NaN" in str(request.error)
    else:
        assert (request.output_token_ids, str(request.finish_reason)) == (expected.tokens, expected.reason)
        assert request.detokenizer.text == expected.events == expected.text


def soak(engine: Engine, rng: random.Random, turns: int) -> dict[str, int]:
    table = prompts()
    live: dict[str, tuple[Request, Expected]] = {}
    seen = dict.fromkeys(("ended", "cancelled", "refused", "failed", "error"), 0)
    while turns > 0 or engine.has_work:
        turns -= 1
        while turns > 0 and len(live) < 12 and rng.random() < 0.5:
            if rng.random() < 0.05:
                seen["refused"] += 1
                prompt, params = rng.choice(BAD)
                with pytest.raises((ValueError, TypeError)):
                    engine.add_request(prompt, params)
                continue
            prompt = rng.choice(table)
            params, expected = expectation(rng, prompt)
            if rng.random() < 0.05 and params.max_new_tokens:
                prompt, expected = [*prompt, POISON], Expected([], "", "error")
            request = engine.add_request(prompt, params, namespace=rng.choice([None, None, "tenant"]))
            live[request.id] = request, expected
        if live and rng.random() < 0.05:
            request, expected = live[rng.choice(list(live))]
            expected.cut = True
            seen["cancelled"] += engine.cancel(request.id)
            assert not engine.cancel(request.id)
        if rng.random() < 0.03:
            seen["failed"] += 1
            fail_next(engine)
        try:
            events = engine.step()
        except RuntimeError:
            events = []
        for event in events:
            live[event.request_id][1].events += event.text
        for request_id in [i for i, (request, _) in live.items() if request.finish_reason is not None]:
            request, expected = live.pop(request_id)
            verify(request, expected)
            seen["ended"] += 1
            seen["error"] += request.finish_reason == "error"
        if rng.random() < 0.02 and engine.kv.tree is not None:
            engine.kv.tree.check_invariants()
    assert not live
    return seen


def fail_next(engine: Engine) -> None:
    vars(engine.runner).pop("run", None)
    fail_once(engine, RuntimeError("soak"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        (1, {"num_pages": 26, "page_size": 4, "max_batch_tokens": 16, "max_requests": 6}),
        (2, {"num_pages": 90, "page_size": 1, "max_batch_tokens": 40, "max_requests": 12}),
        (3, {"num_pages": 8, "page_size": 16, "max_batch_tokens": 7, "max_requests": 4}),
        (4, {"num_pages": 26, "page_size": 4, "max_batch_tokens": 64, "max_requests": 8, "prefix_cache": False}),
    ],
)
def test_soak(seed: int, settings: dict[str, Any]) -> None:
    assert len(prompts()) > 15  # and what the model says to each is worked out here
    engine = make_engine(tokenizer=tokenizer(), **settings)
    with poisoned():
        seen = soak(engine, random.Random(seed), TURNS)
    assert all(seen.values()), f"something never happened: {seen}"
    assert engine.scheduler.num_preemptions > 0
    assert_idle(engine)
    engine.close()
    assert engine.kv.allocator.num_free == engine.kv.num_usable
    assert engine.kv.tree is None or (engine.kv.tree.num_pages == 0 and engine.stats.cached_tokens > 0)
