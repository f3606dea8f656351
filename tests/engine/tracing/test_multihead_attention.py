"""Models of one's own that are made of PyTorch's modules of attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paged_attn import LLM, SamplingParams
from tests.engine.tracing.multihead import VOCAB, WIDTH, Encoder, Multihead
from tests.oracle import random_prompts

PROMPTS = [[token % VOCAB for token in prompt] for prompt in random_prompts((1, 5, 17, 40))]


MODELS = {
    "attention alone": lambda: Multihead(need_weights=False),
    "with weights": lambda: Multihead(),
    "keys of another width": lambda: Multihead(WIDTH, need_weights=False),
    "an encoder": lambda: Encoder(),
    "an encoder, norms first": lambda: Encoder(norm_first=True, activation="gelu"),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_models(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    expected = [whole(model, prompt) for prompt in PROMPTS]
    theirs = F.multi_head_attention_forward
    with LLM(model, page_size=4, num_pages=64, max_batch_tokens=16) as llm:
        assert len(llm.engine.runner.layers) == 2
        got = llm.generate(PROMPTS, SamplingParams(max_new_tokens=9))
    assert [each.token_ids for each in got] == expected
    assert F.multi_head_attention_forward is theirs and torch.backends.mha.get_fastpath_enabled()


@torch.no_grad()
def whole(model: nn.Module, prompt: list[int], new: int = 9) -> list[int]:
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]
