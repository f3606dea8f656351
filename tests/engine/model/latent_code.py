"""Small decoders with latent attention, written as files of remote code and reference code are. Each takes token ids; logits [1, T, 96]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.model.remote_code import HEADS, POSITIONS, WIDTH, Causal

NOPE, ROTATED, VALUE, RANK = 8, 4, 6, 12
SCALE = (NOPE + ROTATED) ** -0.5


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """x [1, T, heads, ROTATED], turns [T, ROTATED / 2] complex."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns.view(1, x.size(1), 1, -1)).flatten(3).type_as(x)


class LatentLayer(nn.Module):
    """x [1, T, 32] -> the same. Subclasses attend: q and q_rotated [1, T, heads, ..], latent [1, T, 12], rotated [1, T, 1, 4]."""

    bias = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.kv_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(RANK)
        self.q, self.kv_a = nn.Linear(WIDTH, HEADS * (NOPE + ROTATED), bias=False), nn.Linear(WIDTH, RANK + ROTATED, bias=False)
        self.kv_b = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=self.bias)
        self.out = nn.Linear(HEADS * VALUE, WIDTH, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        y = self.norm(x)
        q, q_rotated = self.q(y).view(1, -1, HEADS, NOPE + ROTATED).split([NOPE, ROTATED], -1)
        latent, rotated = self.kv_a(y).split([RANK, ROTATED], -1)
        attended = self.attend(q, turned(q_rotated, turns), self.kv_norm(latent), turned(rotated.unsqueeze(2), turns))
        return x + self.out(attended.flatten(2))

    def keys_and_values(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.kv_b(latent).view(1, -1, HEADS, NOPE + VALUE).split([NOPE, VALUE], -1)
        return torch.cat([keys, rotated.expand(-1, -1, HEADS, -1)], -1), values

    def attend(self, q: Tensor, q_rotated: Tensor, latent: Tensor, rotated: Tensor) -> Tensor:
        raise AssertionError("a subclass attends")


def weights(scores: Tensor) -> Tensor:
    """Scores [1, T, heads, T]."""
    hidden = torch.full((scores.shape[1], scores.shape[1]), float("-inf")).triu_(1)
    scores += hidden.unsqueeze(1)
    return scores.softmax(-1, dtype=torch.float32)


class NaiveLayer(LatentLayer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(2, POSITIONS, HEADS, NOPE + ROTATED), persistent=False)
        self.register_buffer("v_cache", torch.zeros(2, POSITIONS, HEADS, VALUE), persistent=False)

    def attend(self, q: Tensor, q_rotated: Tensor, latent: Tensor, rotated: Tensor) -> Tensor:
        length, (keys, values) = q.size(1), self.keys_and_values(latent, rotated)
        self.k_cache[:1, 0:length] = keys
        self.v_cache[:1, 0:length] = values
        scores = torch.einsum("bshd,bthd->bsht", torch.cat([q, q_rotated], -1), self.k_cache[:1, :length]) * SCALE
        return torch.einsum("bsht,bthd->bshd", weights(scores), self.v_cache[:1, :length])


class AbsorbedLayer(LatentLayer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kv_cache", torch.zeros(2, POSITIONS, RANK), persistent=False)
        self.register_buffer("pe_cache", torch.zeros(2, POSITIONS, ROTATED), persistent=False)

    def attend(self, q: Tensor, q_rotated: Tensor, latent: Tensor, rotated: Tensor) -> Tensor:
        length, weight = q.size(1), self.kv_b.weight.view(HEADS, -1, RANK)
        q = torch.einsum("bshd,hdc->bshc", q, weight[:, :NOPE])
        self.kv_cache[:1, 0:length] = latent
        self.pe_cache[:1, 0:length] = rotated.squeeze(2)
        scores = torch.einsum("bshc,btc->bsht", q, self.kv_cache[:1, :length])
        scores = (scores + torch.einsum("bshr,btr->bsht", q_rotated, self.pe_cache[:1, :length])) * SCALE
        sums = torch.einsum("bsht,btc->bshc", weights(scores), self.kv_cache[:1, :length])
        return torch.einsum("bshc,hdc->bshd", sums, weight[:, -VALUE:])


class PaddedLayer(LatentLayer):
    """Values as wide as keys, as kernels without unequal widths want them; keys and values have a bias."""

    bias = True

    def attend(self, q: Tensor, q_rotated: Tensor, latent: Tensor, rotated: Tensor) -> Tensor:
        keys, values = self.keys_and_values(latent, rotated)
        values = F.pad(values, [0, NOPE + ROTATED - VALUE])
        q, keys, values = (each.transpose(1, 2) for each in (torch.cat([q, q_rotated], -1), keys, values))
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True).transpose(1, 2)[..., :VALUE]


class LatentCausal(Causal):
    def __init__(self) -> None:
        super().__init__()
        frequencies = 1.0 / 10000 ** (torch.arange(0, ROTATED, 2).float() / ROTATED)
        angles = torch.outer(torch.arange(POSITIONS).float(), frequencies)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        x, turns = self.embed(tokens), self.turns[start_pos : start_pos + tokens.size(1)]
        for layer in self.layers:
            x = layer(x, turns)
        return self.head(x)


class Naive(LatentCausal):
    layer = NaiveLayer


class AbsorbedByModel(LatentCausal):
    layer = AbsorbedLayer


class Padded(LatentCausal):
    layer = PaddedLayer
