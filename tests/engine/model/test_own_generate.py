"""A model whose generate gives other logits than calls of all tokens: refused or said, since there are two answers."""

from __future__ import annotations

import logging
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CompileConfig, PreTrainedModel

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.engine.model.own_generate import refuse_other_generate
from paged_attn.hf.cache_name import CACHE_NAME, CACHE_NAMES
from tests.oracle import random_prompts
from tests.tiny_models import VOCAB, build_short
from tests.zoo.build import build


def counting_otherwise() -> PreTrainedModel:
    """Its generate numbers positions 0, 2, 4, ..., as code of one's own may."""
    model = build_short("llama")

    def prepare(self: Any, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = type(self).prepare_inputs_for_generation(self, input_ids, **kwargs)
        end, count = input_ids.shape[1], inputs["input_ids"].shape[1]
        return inputs | {"position_ids": torch.arange(end - count, end)[None] * 2}

    model.prepare_inputs_for_generation = MethodType(prepare, model)  # type: ignore[method-assign]
    return model


def shifted_within_a_call(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """In a step of decoding there is no token before."""
    x, *others = args
    return (x + F.pad(x, (0, 0, 1, 0))[:, :-1], *others)


class Plain(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids).logits
        return logits


def test_positions_that_generate_numbers_otherwise() -> None:
    words = (
        r"LlamaForCausalLM.generate\(\) gives other logits than a call of all its tokens: already for the prompt, .*Mend its prepare_inputs"
    )
    with pytest.raises(UnsupportedError, match=words):
        LLM(counting_otherwise(), num_pages=20)
    LLM(counting_otherwise(), num_pages=20, self_check=False).close()
    with LLM(Plain(counting_otherwise()).eval(), num_pages=20) as llm:  # as the refusal says
        (prompt,) = random_prompts((9,))
        (got,) = llm.generate([prompt], SamplingParams(max_new_tokens=1))
        assert got.token_ids == [int(counting_otherwise()(torch.tensor([prompt])).logits[0, -1].argmax())]


def test_a_cache_that_lacks_something(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever compares with generate is told; calls of all tokens are served, as of a model that cannot generate."""
    model = build_short("llama")
    model.model.layers[0].register_forward_pre_hook(shifted_within_a_call)
    refuse_other_generate(model, VOCAB, False)
    assert "with its cache, token by token, they are off by" in caplog.text and "served are the calls of all tokens" in caplog.text


def test_recurrent_layers_are_served_as_with_a_cache(caplog: pytest.LogCaptureFixture) -> None:
    """Zamba2 limits its time steps from below only where it computes several tokens at once."""
    model, (prompt,) = build("zamba2"), random_prompts((24,))
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=4, min_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    tokens = output.sequences[0, 24:]
    alone = model(output.sequences).logits[0, 23:-1].log_softmax(-1)[range(4), tokens]
    with_cache = torch.cat(output.logits).log_softmax(-1)[range(4), tokens]
    with LLM(model, num_pages=20) as llm:
        (got,) = llm.generate([prompt], SamplingParams(max_new_tokens=4, logprobs=1))
    assert got.token_ids == tokens.tolist() and got.logprobs is not None
    served = torch.tensor([row[token] for row, token in zip(got.logprobs, got.token_ids, strict=True)])
    assert torch.allclose(served, with_cache, atol=1e-4) and not torch.allclose(served, alone, atol=1e-3)
    assert "the calls of all tokens, but for its recurrent layers: those compute the tokens of an answer as they do" in caplog.text


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral"])
def test_generate_that_agrees(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paged_attn"):
        refuse_other_generate(build_short(name), VOCAB, False)
    assert "not compared" not in caplog.text


def test_nothing_is_compiled_for_a_few_steps(caplog: pytest.LogCaptureFixture) -> None:
    """On a GPU transformers compiles a model whose own settings ask for a static cache, which takes minutes."""
    model = build_short("llama")
    everywhere = CompileConfig()
    everywhere._compile_all_devices = True
    model.generation_config.update(cache_implementation="static", compile_config=everywhere)
    model.get_compiled_call = lambda *_: pytest.fail("it is compiled")  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, "paged_attn"):
        refuse_other_generate(model, VOCAB, False)
    assert not caplog.text


def test_a_cache_by_another_name_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    """transformers would generate as if there were no cache, which says nothing of the model."""
    model = build_short("llama")
    model.model.layers[0].register_forward_pre_hook(shifted_within_a_call)
    (other, *_) = (name for name in CACHE_NAMES if name != CACHE_NAME)
    scope: dict[str, Any] = {}
    exec(f"def forward(self, input_ids, {other}=None, **more): return type(self).forward(self, input_ids, **more)", scope)
    model.forward = MethodType(scope["forward"], model)
    with caplog.at_level(logging.INFO, "paged_attn"):
        refuse_other_generate(model, VOCAB, False)
    assert f"takes {other}, and transformers' generate gives it {CACHE_NAME}: not compared" in caplog.text


def test_a_model_in_16_bits_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    """Rounding alone may turn experts' choices, and nobody should be warned of that."""
    model = build_short("llama").to(torch.bfloat16)
    model.model.layers[0].register_forward_pre_hook(shifted_within_a_call)
    refuse_other_generate(model, VOCAB, False)
    assert not caplog.text
