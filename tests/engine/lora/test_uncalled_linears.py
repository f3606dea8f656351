"""Where a model's own code multiplies with a linear layer's weight, peft's adapter of that layer adds nothing; nor does ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams, UnsupportedError
from tests.engine.lora.adapters import base
from tests.oracle import greedy

PROMPT = [5, 9, 2, 33, 17]


class Uncalled(nn.Module):
    """Multiplies with the weight of down_proj; with `too` it calls it as well."""

    def __init__(self, mlp: Any, too: bool) -> None:
        super().__init__()
        self.mlp, self.too = mlp, too

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mlp.act_fn(self.mlp.gate_proj(x)) * self.mlp.up_proj(x)
        lent = F.linear(hidden, self.mlp.down_proj.weight)
        return lent + self.mlp.down_proj(hidden * 0.5) if self.too else lent


def uncalled(too: bool, dtype: torch.dtype = torch.float32) -> Any:
    model = base()
    model.model.layers[1].mlp = Uncalled(model.model.layers[1].mlp, too)
    return model.to(dtype)


def adapted(folder: Any, targets: list[str], too: bool) -> Any:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(uncalled(too), peft.LoraConfig(target_modules=targets, r=4))
    numbers = torch.Generator().manual_seed(1)
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            parameter.data = torch.randn(parameter.shape, generator=numbers) * 0.3
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("too", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_other_layers_are_served_and_those_of_it_refused(tmp_path: Any, too: bool, dtype: torch.dtype) -> None:
    other = adapted(tmp_path / "other", ["q_proj", "layers.0.mlp.down_proj"], too)
    adapted(tmp_path / "both", ["down_proj"], too)
    with LLM(uncalled(too, dtype), max_loras=2, num_pages=40) as llm:
        llm.load_lora("other", tmp_path / "other")
        with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.mlp\.down_proj, whose weight this model's own code multiplies with"):
            llm.load_lora("both", tmp_path / "both")
        got = llm.generate([PROMPT, PROMPT], SamplingParams(max_new_tokens=8), lora=["other", None])
    if dtype == torch.float32:
        assert [each.token_ids for each in got] == [greedy(other, PROMPT, 8), greedy(uncalled(too), PROMPT, 8)]
