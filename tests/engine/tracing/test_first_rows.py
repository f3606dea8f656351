"""What the first rows of a call do not show: numbers that are others on later ones, and tables as long as the model's positions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from paged_attn import LLM, SamplingParams
from tests.zoo.build import build

LENGTHS, NEW, POSITIONS = (1, 5, 40, 70), 8, 256


class SmallConfig(PreTrainedConfig):
    model_type = "small"

    def __init__(self, **given: Any) -> None:
        self.hidden_size, self.vocab_size, self.max_position_embeddings = 32, 96, POSITIONS
        super().__init__(**given)


class Small(PreTrainedModel):
    """One layer of attention without positions, which transformers knows nothing of; its embeddings have no usual name."""

    config_class = SmallConfig

    def __init__(self, config: SmallConfig) -> None:
        super().__init__(config)
        self.tokens, self.blocks, self.by_distance = nn.Embedding(96, 32), nn.Embedding(16, 32), nn.Embedding(POSITIONS, 4)
        self.qkv, self.out, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 96, bias=False)

    def embedded(self, input_ids: Tensor, row: Tensor) -> Tensor:
        return self.tokens(input_ids)

    def bias(self, row: Tensor) -> Tensor | float:
        return 0.0

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutputWithPast:
        row = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embedded(input_ids, row)
        q, k, v = (part.view(*part.shape[:2], 4, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(8) + self.bias(row)).masked_fill(row[:, None] < row, -1e9)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
        return CausalLMOutputWithPast(logits=self.head(x))


class BlockEmbeddings(Small):
    def embedded(self, input_ids: Tensor, row: Tensor) -> Tensor:
        return self.tokens(input_ids) + self.blocks(row // 32)


class GrowsLate(Small):
    def embedded(self, input_ids: Tensor, row: Tensor) -> Tensor:
        return self.tokens(input_ids) * (1 + 3 * (row // 30))[:, None]


class LearnedDistances(Small):
    """As long as the model's positions, and no longer."""

    def bias(self, row: Tensor) -> Tensor:
        return self.by_distance((row[:, None] - row).clamp(min=0)).permute(2, 0, 1)


def served(model: PreTrainedModel) -> None:
    """Token for token, among others, in small steps."""
    numbers = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, 90, (length,), generator=numbers).tolist() for length in LENGTHS]
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=NEW, temperature=0, ignore_eos=True), progress=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(prompt)
        for _ in range(NEW):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        assert output.token_ids == tokens[len(prompt) :], len(prompt)


@pytest.mark.parametrize("kind", [BlockEmbeddings, GrowsLate, LearnedDistances])
@torch.no_grad()
def test_a_model_of_ones_own(kind: type[Small]) -> None:
    torch.manual_seed(0)
    model = kind(SmallConfig()).eval()
    for parameter in model.parameters():
        parameter.normal_(std=1.0 if parameter.shape[-1] in (4, 32) and parameter.shape[0] in (16, 96, POSITIONS) else 0.25)
    served(model)


@torch.no_grad()
def test_llama_4_scales_queries_by_position() -> None:
    """By 1 up to row 8,191 of its own calls: here up to row 31."""
    served(build("llama4_text", floor_scale=32, attn_scale=3.0))
