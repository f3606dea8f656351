"""Models of one's own that are made of PyTorch's modules of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams
from tests.oracle import random_prompts

VOCAB, WIDTH, HEADS = 64, 32, 4
PROMPTS = [[token % VOCAB for token in prompt] for prompt in random_prompts((1, 5, 17, 40))]


class Multihead(nn.Module):
    """nn.MultiheadAttention under a causal mask; `settings` are those of its call."""

    def __init__(self, kdim: int | None = None, **settings: Any) -> None:
        super().__init__()
        self.embed, self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Embedding(128, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, kdim=kdim, vdim=kdim) for _ in range(2))
        self.norms, self.settings = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)), settings

    def forward(self, ids: Tensor) -> Tensor:
        count = ids.shape[1]
        x = self.embed(ids) + self.table(torch.arange(count, device=ids.device))
        mask = torch.ones(count, count, dtype=torch.bool, device=ids.device).triu(1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = norm(x)
            x = x + layer(y, y, y, attn_mask=mask, **self.settings)[0]
        return self.head(x)


class Encoder(nn.Module):
    """nn.TransformerEncoder as a decoder, which is how its tutorial has it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.embed, self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(128, WIDTH)), nn.Linear(WIDTH, VOCAB)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, **settings)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        count = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(count, device=ids.device)
        return self.head(self.layers(self.embed(ids) + self.table[:count], mask=mask, is_causal=True))


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
