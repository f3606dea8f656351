"""Models of one's own that are made of PyTorch's modules of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCAB, WIDTH, HEADS = 64, 32, 4


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
