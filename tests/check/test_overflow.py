"""A float16 model whose own numbers overflow is refused with these words, and nothing else is blamed for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paged_attn.check.runs.steps import LONGEST, probe_prompts
from tests.check.checked import Hooked, Traced, refused
from tests.zoo.build import build
from tests.zoo.shrink import VOCAB


def overflowing() -> nn.Module:
    """Of the values of the first layer, only those of late tokens are too large for float16; products with a weight of zero make earlier
    rows NaN, too."""
    model = build("llama", num_hidden_layers=2)
    attention, seen = model.model.layers[0].self_attn, list[torch.Tensor]()
    prompts = probe_prompts(torch.device("cpu"), VOCAB)
    with torch.no_grad(), torch.random.fork_rng():
        hook = attention.v_proj.register_forward_hook(lambda _, __, values: seen.append(values[0].abs().amax(-1)))
        for prompt in prompts:
            model(input_ids=prompt[None])
        hook.remove()
        first, later = seen[LONGEST][:3].max(), seen[LONGEST][3:].max()
        assert later > 1.1 * first
        factor = 2 * torch.finfo(torch.float16).max / (first + later)
        attention.v_proj.weight *= factor
        attention.o_proj.weight /= factor
    return model.half()


@pytest.mark.parametrize("kind", [Traced, Hooked])
def test_a_later_token_is_not_blamed_for_what_overflows(kind: type[Traced | Hooked]) -> None:
    words = refused(kind(overflowing()))
    assert words.startswith("LlamaForCausalLM itself gives numbers that are infinite or NaN in "), words
    assert "model.layers.0.self_attn" in words.split(" for a random prompt")[0]
    assert "or load the model in bfloat16" in words
