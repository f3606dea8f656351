"""What the unmodified model generates by itself: the oracle of every end-to-end test."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tests.tiny_models import VOCAB


def random_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    """Token ids from 2 up: 0 is the padding id, which generate() would take for padding, and 1 begins a text."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def greedy(model: nn.Module, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """The model's own greedy generate of one prompt alone: the new ids."""
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()
