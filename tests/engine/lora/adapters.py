"""Adapters of peft over tiny models: their folders, and what peft itself generates with each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import greedy
from tests.tiny_models import build_short

PROJECTIONS = ("q_proj", "v_proj", "o_proj", "down_proj")


def base(name: str = "llama") -> Any:
    return build_short(name, tie_word_embeddings=False)


def adapted(name: str = "llama", seed: int = 1, targets: Sequence[str] = PROJECTIONS, **settings: Any) -> Any:
    """A tiny model under one adapter whose factors are not those that it starts with, which change nothing."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(base(name), peft.LoraConfig(target_modules=list(targets), task_type="CAUSAL_LM", **{"r": 4, **settings}))
    numbers = torch.Generator().manual_seed(seed)
    for path, parameter in model.named_parameters():
        if "lora_" in path or "modules_to_save" in path:
            parameter.data = torch.randn(parameter.shape, generator=numbers) * 0.3
    return model.eval()


class Adapters:
    """Several of one model: `folders` by name, and what the model generates with each, or (None) without."""

    def __init__(self, folder: Path, name: str, settings: dict[str, dict[str, Any]]) -> None:
        self.folders = {each: str(folder / each) for each in settings}
        self.models = {each: adapted(name, seed=seed, **given) for seed, (each, given) in enumerate(settings.items(), 1)}
        for each, model in self.models.items():
            model.save_pretrained(self.folders[each])
        self.models[None] = base(name)

    def generate(self, which: str | None, prompt: list[int], count: int = 8) -> list[int]:
        return greedy(self.models[which], prompt, count)

    def expected(self, prompts: Sequence[list[int]], which: Sequence[str | None], count: int = 8) -> list[list[int]]:
        return [self.generate(each, prompt, count) for prompt, each in zip(prompts, which, strict=True)]
