"""What mode the caller is in (inference mode, autocast, a default device) and what a config puts out besides logits changes no token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from paged_attn import LLM, KVPool, SamplingParams, patch
from tests.engine.models import oracle, random_prompts
from tests.tiny_models import build
from tests.zoo.build import build as build_type
from tests.zoo.oracle import generate

PROMPTS = random_prompts(3, 1, 5, 17, 33)
GREEDY = SamplingParams(max_new_tokens=8)
DRAWN = SamplingParams(max_new_tokens=8, temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.2)


def autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def default_device() -> AbstractContextManager[object]:
    return torch.device("meta")


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("mode", [torch.inference_mode, autocast, default_device])
@pytest.mark.parametrize("compiled", [True, False])
def test_an_engine_that_is_made_and_used_in_a_mode_and_outside_of_it(
    mode: Callable[[], AbstractContextManager[object]], compiled: bool
) -> None:
    model = build("qwen3", tie_word_embeddings=False)
    expected = [oracle(prompt, 8, model) for prompt in PROMPTS]
    with mode():
        llm = LLM(model, page_size=4, num_pages=100, max_batch_tokens=16, compile=compiled)
        assert tokens(llm) == expected
        drawn = tokens(llm, DRAWN)
    assert tokens(llm) == expected and tokens(llm, DRAWN) == drawn
    with mode():
        assert tokens(llm) == expected and tokens(llm, DRAWN) == drawn
    llm.close()


def test_a_model_whose_parameters_were_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = build("qwen3", tie_word_embeddings=False)
    with LLM(model, page_size=4, num_pages=100, max_batch_tokens=16, merge_linears=True) as llm:
        assert tokens(llm) == [oracle(prompt, 8, model) for prompt in PROMPTS]


def test_recurrent_state_is_found_in_inference_mode() -> None:
    model = build_type("mamba2")
    expected = [generate(model, prompt, 8) for prompt in PROMPTS]
    with torch.inference_mode(), LLM(model, page_size=4, num_pages=100, max_batch_tokens=16) as llm:
        assert tokens(llm) == expected


def test_a_patch_is_entered_in_inference_mode() -> None:
    model = build("qwen3")
    with torch.inference_mode(), patch(model) as patched:
        assert KVPool(patched.layers, 4, 16, torch.float32).layers == patched.layers


@pytest.mark.parametrize("output", ["output_hidden_states", "output_attentions", "output_router_logits"])
@pytest.mark.parametrize("name", ["gpt_oss", "gpt2"])
def test_outputs_besides_logits_are_left_out_while_the_model_is_captured(name: str, output: str) -> None:
    model = build_type(name)
    expected = [generate(model, prompt, 8) for prompt in PROMPTS]
    if output == "output_attentions":
        model.set_attn_implementation("eager")
    setattr(model.config, output, True)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with LLM(model, page_size=4, num_pages=100, max_batch_tokens=16) as llm:
        assert tokens(llm) == expected
    assert getattr(model.config, output) is True
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
