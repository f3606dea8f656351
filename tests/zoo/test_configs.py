"""Every causal-LM type has a tiny model, and its weights are such that a lost feature would show in its tokens."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import random_prompts
from tests.zoo.build import build, seeded
from tests.zoo.configs import TYPES, config_for, model_class
from tests.zoo.oracle import generate, oracle
from tests.zoo.overrides import NOT_STANDALONE, OVERRIDES
from tests.zoo.run_one import first_sentence, verdict
from tests.zoo.shrink import kinds_of_layers

PROMPTS = random_prompts((17, 33))


@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in NOT_STANDALONE])
def test_every_type_builds_small(model_type: str) -> None:
    model = seeded(model_class(model_type), config_for(model_type), seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) < 5_000_000
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_what_is_left_out_has_a_reason() -> None:
    assert all(reason.strip() and not reason.endswith(".") for reason in NOT_STANDALONE.values())
    assert not set(NOT_STANDALONE) & set(OVERRIDES)


def test_every_kind_of_layer_is_kept() -> None:
    kinds = ["linear"] * 5 + ["full"], ["dense"] + ["sparse"] * 5
    assert kinds_of_layers(kinds) == [0, 1, 5]
    assert kinds_of_layers([["a"] * 9]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("model_type", "part"),
    [("gpt_oss", "sinks"), ("deepseek_v3", "e_score_correction_bias"), ("qwen2", "q_proj.bias"), ("mamba", "A_log"), ("qwen3", "q_norm")],
)
def test_a_parameter_that_is_lost_changes_the_tokens(model_type: str, part: str) -> None:
    model = build(model_type)
    before = [generate(model, prompt, 12) for prompt in PROMPTS]
    found = [tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()] if part in name]
    assert found
    with torch.no_grad():
        for tensor in found:
            tensor.fill_(-100 if part == "sinks" else 0)  # a sink that is lost adds nothing to the denominator
    assert [generate(model, prompt, 12) for prompt in PROMPTS] != before


@pytest.mark.parametrize(("model_type", "change"), [("mistral", {"sliding_window": 9}), ("granite", {"attention_multiplier": 0.5}),
                                                    ("llama4_text", {"attention_chunk_size": 9}), ("falcon", {"alibi": True})])  # fmt: skip
def test_a_feature_that_is_off_changes_the_tokens(model_type: str, change: dict[str, object]) -> None:
    models = [seeded(model_class(model_type), config_for(model_type, **each), seed=0) for each in ({}, change)]
    right, wrong = ([generate(model, prompt, 12) for prompt in PROMPTS] for model in models)
    assert right != wrong


def test_wrong_tokens_are_called_wrong() -> None:
    prompts = random_prompts((1, 5, 17, 33, 70))
    truth = oracle(build("llama"), prompts, 3)
    assert truth.truth is not None and not truth.weakness
    assert verdict({"a run": truth.truth}, truth) == ("ok", "")
    broken = [tokens.copy() for tokens in truth.truth]
    broken[2][1] += 1
    result, reason = verdict({"a run": truth.truth, "another": broken}, truth)
    assert result == "wrong" and "another: prompt of 17 tokens differs from new token 1 on" in reason


@pytest.mark.parametrize(
    ("words", "sentence"),
    [("no. 5 is off. It is.", "no. 5 is off"), ("says:\n  the cause\nmore", "says: the cause"), ("model.layers.0: x", "model.layers.0: x")],
)
def test_a_reason_is_one_sentence(words: str, sentence: str) -> None:
    assert first_sentence(words) == sentence
