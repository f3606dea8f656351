"""What a block of experts is given to see what it computes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paged_attn.engine.tracing.looping.calls import BlockCall, GivenTensor

SPREADS = (1.0, 8.0, 0.02)  # of logits; the last leaves ties in 16 bits
ROWS = (24, 3)


def given_tensors(call: BlockCall, tokens: int, hidden: int, experts: int, device: torch.device, seed: int = 0) -> list[Tensor]:
    """Random ones of a call of so many tokens: integers are ids of experts, different ones for a token, and narrow rows weights."""
    numbers = torch.Generator().manual_seed(seed)
    return [_given(each, tokens, hidden, experts, numbers).to(device, each.dtype) for each in call.tensors]


def _given(each: GivenTensor, tokens: int, hidden: int, experts: int, numbers: torch.Generator) -> Tensor:
    sizes = each.sizes(tokens)
    if each.dtype.is_floating_point:
        return torch.randn(sizes, generator=numbers) if sizes[-1] == hidden else torch.rand(sizes, generator=numbers)
    chances = torch.rand(tokens, experts, generator=numbers)
    chances[:, : experts // 3] *= 0.9  # some are chosen more rarely
    count = torch.Size(sizes).numel() // tokens
    return chances.topk(min(count, experts), dim=1).indices.reshape(sizes if count <= experts else (tokens, -1))


def logits_of(tokens: int, experts: int) -> Iterator[Tensor]:
    """Random ones, equal ones, and such that one expert, or two, get every token and others none; [tokens, experts] in float32."""
    numbers = torch.Generator().manual_seed(tokens)
    for spread in SPREADS:
        yield torch.randn(tokens, experts, generator=numbers) * spread
    yield torch.zeros(tokens, experts)
    for wanted in range(min(experts, 3)):
        crowded = torch.randn(tokens, experts, generator=numbers)
        crowded[:, wanted] += 20.0
        yield crowded
