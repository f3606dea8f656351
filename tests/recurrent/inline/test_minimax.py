"""Lightning attention, whose layers write their recurrence inline, by ops on slots: token for token what the model says."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import paged_attn
from paged_attn import SamplingParams
from paged_attn.attn_ops.errors import CaptureError
from paged_attn.recurrent.as_ops.by_ops import with_ops
from tests.engine.models import assert_idle, make_llm, run_all
from tests.engine.steps.test_captured_steps import captured_engine, modes_of, tokens_of
from tests.engine.test_recurrent import poison_freed_slots
from tests.oracle import greedy, random_prompts
from tests.recurrent.test_by_ops import layers_of
from tests.zoo.build import build

PROMPTS = random_prompts((1, 5, 64, 300))
NEW = 8


@functools.cache
def minimax() -> PreTrainedModel:
    return build("minimax", max_position_embeddings=512)


@functools.cache
def expected() -> list[list[int]]:
    found = [greedy(minimax(), prompt, NEW) for prompt in PROMPTS]
    assert len(set(map(tuple, found))) == len(found)
    return found


@pytest.mark.parametrize("settings", [{"page_size": 16}, {"page_size": 1, "state_snapshots": 16, "max_requests": 2}], ids=str)
def test_tokens_are_the_models_in_ragged_chunked_batches_and_from_snapshots(settings: dict[str, Any]) -> None:
    llm = make_llm(minimax(), **{"num_pages": 600, "max_batch_tokens": 48, **settings})
    poison_freed_slots(llm.engine)
    (layer,) = llm.engine.runner.recurrent
    assert layer.ops == ("linear_attention",) and layer.spec.states[0].shape == (4, 8, 8)
    for run in ("cold", "warm"):
        got = llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
        assert [each.token_ids for each in got] == expected(), run
        assert any(each.cached_tokens for each in got) == (run == "warm")
    assert_idle(llm.engine)
    assert "by ops on the slots of its state (linear_attention)" in paged_attn.explain(llm)


def test_preempted_requests_start_again() -> None:
    prompts = PROMPTS[:3]
    llm = make_llm(minimax(), page_size=4, num_pages=20, max_batch_tokens=16)
    assert [each.token_ids for each in llm.generate(prompts, SamplingParams(max_new_tokens=NEW))] == expected()[:3]
    assert llm.engine.scheduler.stats.preemptions > 0
    assert_idle(llm.engine)


def test_decode_steps_are_recorded_whole() -> None:
    prompts = random_prompts((5, 1, 17))
    engine = captured_engine(minimax(), graph_strict=True, max_requests=3)
    modes = modes_of(engine)
    assert tokens_of(engine, prompts) == [greedy(minimax(), prompt, 12) for prompt in prompts]
    assert "full" in modes
    (layer,) = (layer.module for layer in engine.runner.recurrent)
    before, layer.slope_rate = layer.slope_rate, torch.nn.Buffer(layer.slope_rate.clone())
    try:
        engine.add_request(prompts[0], SamplingParams(max_new_tokens=3))
        with pytest.raises(CaptureError, match=r"self_attn\.slope_rate was replaced"):
            run_all(engine)
    finally:
        layer.slope_rate = before


def test_in_16_bits_it_is_proved_too() -> None:
    (layer,) = with_ops(layers_of(build("minimax").to(torch.bfloat16)))
    assert layer.ops == ("linear_attention",)


def test_a_deep_model_with_random_weights_is_served() -> None:
    """Of which float32's rounding moves all logits of a token alone: block by block it does not."""
    with paged_attn.LLM(build("minimax", num_hidden_layers=24), num_pages=16, self_check=False) as llm:
        assert all(layer.ops for layer in llm.engine.runner.recurrent)
