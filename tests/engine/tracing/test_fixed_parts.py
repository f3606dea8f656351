"""Modules that cut their rows into parts of a fixed size: a trace has as many parts as its tokens needed, so they run unchanged."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams
from tests.oracle import greedy, random_prompts
from tests.zoo.build import build

LENGTHS = (1, 5, 33, 40, 41, 130)
CUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "split": lambda x: x.split(40, dim=1),
    "chunk": lambda x: x.chunk(-(-x.shape[1] // 40), dim=1),
    "slices": lambda x: tuple(x[:, start : start + 40] for start in range(0, x.shape[1], 40)),
}


class InParts(nn.Module):
    def __init__(self, mlp: nn.Module, cut: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.mlp, self.cut = mlp, cut

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.mlp(part) for part in self.cut(x)], 1)


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("self_check", [True, False])
def test_tokens_are_the_models_own(name: str, self_check: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama").eval()
    model.model.layers[1].mlp = InParts(model.model.layers[1].mlp, CUTS[name])
    prompts = random_prompts(LENGTHS)
    with caplog.at_level(logging.INFO, "paged_attn"), LLM(model, num_pages=200, self_check=self_check, max_batch_tokens=64) as llm:
        found = [each.token_ids for each in llm.generate(prompts, SamplingParams(max_new_tokens=6))]
    assert found == [greedy(model, prompt, 6) for prompt in prompts]
    assert "so many before them, run through model.layers.1.mlp (0)" in caplog.text and "all tokens of a request" not in caplog.text


def test_a_longer_part_is_a_limit() -> None:
    """One part is what all calls of up to 600 tokens have, and costs nothing."""
    model = build("llama", max_position_embeddings=1000).eval()
    model.model.layers[1].mlp = InParts(model.model.layers[1].mlp, lambda x: x.split(600, dim=1))
    with LLM(model, num_pages=100) as llm:
        (found,) = llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=6))
        assert llm.engine.input_processor.room == 600 and found.token_ids == greedy(model, [5, 6, 7], 6)
