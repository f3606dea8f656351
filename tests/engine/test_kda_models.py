"""Models with a gated delta rule whose channels decay each by itself, served: token for token, chunked, preempted, from snapshots."""

from __future__ import annotations

import functools

import pytest
from transformers import PreTrainedModel

from paged_attn import SamplingParams
from tests.engine.models import assert_idle, make_llm
from tests.oracle import greedy, random_prompts
from tests.zoo.build import build

PROMPTS = random_prompts((1, 5, 17, 33, 70))
NEW = 12


@functools.cache
def model_and_tokens(name: str) -> tuple[PreTrainedModel, list[list[int]]]:
    model = build(name)
    return model, [greedy(model, prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["kimi_linear", "bailing_hybrid"])
def test_tokens_are_the_models_in_ragged_chunked_batches_and_from_snapshots(name: str) -> None:
    model, expected = model_and_tokens(name)
    llm = make_llm(model, page_size=4, max_batch_tokens=16, num_pages=200)
    layers = llm.engine.runner.recurrent
    assert layers and all(layer.ops == ("short_conv", "kda") for layer in layers)
    assert llm.engine.state_pool is not None
    llm.engine.state_pool.fill(float("nan"))
    for run in ("first", "second"):
        got = llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
        assert [c.token_ids for c in got] == expected, f"{run} run"
        assert any(c.cached_tokens for c in got) == (run == "second")
    assert_idle(llm.engine)


def test_preempted_requests_start_again() -> None:
    model, expected = model_and_tokens("kimi_linear")
    llm = make_llm(model, page_size=4, num_pages=23, max_batch_tokens=16)
    assert [c.token_ids for c in llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))] == expected
    assert llm.engine.scheduler.stats.preemptions > 0
    assert_idle(llm.engine)
