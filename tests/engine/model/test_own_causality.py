"""A model that is not causal by itself is refused for that, in every dtype, and not for what came of it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.engine.model.causality import refuse_acausal
from tests.oracle import random_prompts
from tests.tiny_models import build
from tests.zoo.build import build as build_type
from tests.zoo.oracle import generate

CHOICE = r"DogeForCausalLM itself is not causal: .*of more than 8 keys, which 8 a query takes changes with the number of tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_choice_among_equal_scores_is_refused_where_it_is_made(dtype: torch.dtype) -> None:
    model = build_type("doge", keep_window_size=8, sliding_window=None).to(dtype)
    with pytest.raises(UnsupportedError, match=CHOICE):
        LLM(model, num_pages=40)


def test_below_the_number_of_keys_that_it_keeps_the_model_is_served() -> None:
    model = build_type("doge", keep_window_size=64, sliding_window=None, max_position_embeddings=64)
    prompts = random_prompts((1, 5, 17, 33))
    with LLM(model, num_pages=40, max_batch_tokens=16) as llm:
        assert [spec.chooses for spec in llm.engine.runner.layers] == [64] * 3  # type: ignore[attr-defined]
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))]
    assert got == [generate(model, prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("compiled", [True, False])
def test_one_scale_for_all_tokens_of_a_call_is_refused(compiled: bool) -> None:
    model: nn.Module = build("qwen3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    words = r"itself is not causal: in a call of 24 tokens .* computed from all tokens of a call at once, such as the scale"
    with pytest.raises(UnsupportedError, match=words) as told:
        LLM(model, num_pages=20, compile=compiled)
    assert "compile" not in str(told.value)


class Plain(nn.Module):
    """Logits of a token alone, up to `longest` tokens, plus `mixed` of the mean over the call."""

    def __init__(self, mixed: float = 0.0, longest: int = 1000) -> None:
        super().__init__()
        self.table, self.mixed, self.longest = nn.Embedding(96, 96), mixed, longest

    def forward(self, input_ids: Tensor) -> Tensor:
        assert input_ids.shape[1] <= self.longest
        x: Tensor = self.table(input_ids)
        return x + self.mixed * x.mean(1, keepdim=True)


@pytest.mark.parametrize("start", [0, 40])
def test_what_is_compared(start: int) -> None:
    refuse_acausal(Plain(), start, 96, "")
    refuse_acausal(Plain(mixed=1.0, longest=start + 20), start, 96, "")  # it cannot be called on so many
    with pytest.raises(UnsupportedError, match=rf"Plain itself is not causal: in a call of {start + max(24, start)} tokens .*: it means"):
        refuse_acausal(Plain(mixed=1.0), start, 96, "it means")
