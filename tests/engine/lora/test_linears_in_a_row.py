"""A linear layer behind another one reads what that one's adapter has added; and models with states are checked for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.engine.lora import lora_runner
from tests.engine.lora.adapters import base
from tests.oracle import greedy
from tests.zoo.build import build

PROMPT, ROOM = [5, 9, 2, 33, 17], {"max_loras": 1, "num_pages": 40}


def low_rank() -> Any:
    """A Llama whose down_proj is two linear layers, as KDA's gates and Zamba2's adapters are."""
    model = base()
    for seed, layer in enumerate(model.model.layers):
        torch.manual_seed(seed)
        width, hidden = layer.mlp.down_proj.in_features, layer.mlp.down_proj.out_features
        layer.mlp.down_proj = nn.Sequential(nn.Linear(width, 12, bias=False), nn.Linear(12, hidden))
    return model


@pytest.mark.parametrize("merged", [True, False])
def test_both_have_adapters(merged: bool, tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["down_proj.0", "down_proj.1", "q_proj"], r=4, task_type="CAUSAL_LM")
    adapted, numbers = peft.get_peft_model(low_rank(), config), torch.Generator().manual_seed(1)
    for path, parameter in adapted.named_parameters():
        if "lora_" in path:
            parameter.data = torch.randn(parameter.shape, generator=numbers)
    adapted.save_pretrained(tmp_path)
    with LLM(low_rank(), loras={"a": tmp_path}, merge_linears=merged, num_pages=40) as llm:
        got = llm.generate([PROMPT, PROMPT], SamplingParams(max_new_tokens=12), lora=["a", None])
    assert [each.token_ids for each in got] == [greedy(adapted.eval(), PROMPT, 12), greedy(low_rank(), PROMPT, 12)]


def test_models_with_states_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    errors, compare = [], lora_runner.logits_apart
    monkeypatch.setattr(lora_runner, "logits_apart", lambda *given: errors.append(compare(*given)) or errors[-1])
    with LLM(build("kimi_linear"), **ROOM):
        assert len(errors) == 1 and errors[0][0] <= errors[0][1]
    monkeypatch.setattr(lora_runner, "_random_factors", lambda adapters: lora_runner.ExitStack())  # of nothing: what lies there is zero
    monkeypatch.setattr(lora_runner, "logits_apart", lambda *given: (0.5, 0.1))
    with pytest.raises(UnsupportedError, match=r"the graph of KimiLinearForCausalLM gives logits that are off by 0\.5"):
        LLM(build("kimi_linear"), **ROOM)
