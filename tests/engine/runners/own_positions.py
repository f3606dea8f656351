"""Plain modules that take nothing but tokens, as `forward(idx)`, and number positions in many ways; and a loop without a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, POSITIONS = 96, 16, 128


class Decoder(nn.Module):
    """One layer of attention over tokens + `place(self, x [1, T, 16])`; returns (logits, None)."""

    def __init__(self, place: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.place = place
        self.embed, self.learned = nn.Embedding(VOCAB, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("pe", torch.randn(1, POSITIONS, WIDTH))
        self.register_buffer("numbers", torch.arange(POSITIONS)[None])

    def forward(self, idx: Tensor, targets: None = None) -> tuple[Tensor, None]:
        x = self.place(self, self.embed(idx))
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return self.head(x + 3 * attended), None


def asserted(model: Any, x: Tensor) -> Tensor:
    assert x.shape[1] <= POSITIONS, "longer than the block"
    return x + model.learned(torch.arange(0, x.shape[1], device=x.device))


def asserted_below(model: Any, x: Tensor) -> Tensor:
    assert x.shape[1] <= POSITIONS - 28, "longer than the block, which is shorter than the table"
    return x + model.learned(torch.arange(x.shape[1]))


def sinusoidal(model: Any, x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[1], dtype=torch.float32)[:, None]
    angle = rows * torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
    table = torch.zeros(x.shape[1], WIDTH)
    table[:, 0::2], table[:, 1::2] = angle.sin(), angle.cos()
    return x + table


# Each with the number of positions that the engine must find.
PLACES: dict[str, tuple[Callable[[Any, Tensor], Tensor], int | None]] = {
    "learned": (lambda m, x: x + m.learned(torch.arange(x.shape[1])), POSITIONS),
    "learned, asserted": (asserted, POSITIONS),
    "learned, asserted below the table": (asserted_below, POSITIONS - 28),
    "learned, from the third row": (lambda m, x: x + m.learned(torch.arange(x.shape[1]) + 2), POSITIONS - 2),
    "learned, by stored numbers": (lambda m, x: x + m.learned(m.numbers[:, : x.shape[1]]), POSITIONS),
    "learned, by a running sum": (lambda m, x: x + m.learned(torch.ones_like(x[..., 0]).long().cumsum(1) - 1), POSITIONS),
    "stored": (lambda m, x: x + m.pe[:, : x.shape[1]], POSITIONS),
    "sinusoidal": (sinusoidal, None),
    "none": (lambda m, x: x, None),
}


def greedy_loop(model: nn.Module, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """The model called anew for each token, as its users call it."""
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        for _ in range(new_tokens):
            output = model(ids)
            logits = output if isinstance(output, Tensor) else output.logits if hasattr(output, "logits") else output[0]
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()
