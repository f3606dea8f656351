"""Small decoders that compute as files of remote code do: tables of cosines that are sliced or grown in forward,
masks of buffers, scores through baddbmm. Each takes token ids and, if given, position_ids; logits [1, T, 96]."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, DIM, POSITIONS = 96, 32, 4, 8, 128


def turned(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


class Layer(nn.Module):
    """x [1, T, 32] -> the same; subclasses say how scores are made of q, k [1, heads, T, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]

    def result(self, x: Tensor, weights: Tensor, v: Tensor) -> Tensor:
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class Causal(nn.Module):
    """Embedding, two layers, head."""

    layer: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList(self.layer() for _ in range(2))
        for parameter in self.parameters():
            parameter.data.mul_(2.0)


class SlicedTable(nn.Module):
    """Cosines and sines of POSITIONS rows; the slice of a call, made longer if a call is."""

    def __init__(self, rows: int = POSITIONS) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, DIM, 2).float() / DIM), persistent=False)
        self.fill(rows)

    def fill(self, rows: int) -> None:
        self.rows = rows
        angle = torch.outer(torch.arange(rows, dtype=torch.float32), self.inv_freq)
        both = torch.cat((angle, angle), -1)
        self.register_buffer("cos_cached", both.cos(), persistent=False)
        self.register_buffer("sin_cached", both.sin(), persistent=False)

    def forward(self, x: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        if seq_len > self.rows:
            self.fill(seq_len)
        return self.cos_cached[:seq_len].to(x.dtype), self.sin_cached[:seq_len].to(x.dtype)


class SlicedLayer(Layer):
    rows = POSITIONS

    def __init__(self) -> None:
        super().__init__()
        self.rotary = SlicedTable(self.rows)

    def forward(self, x: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        cos, sin = self.rotary(v, seq_len=k.shape[-2])
        cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
        q, k = (each * cos + turned(each) * sin for each in (q, k))
        scores = q @ k.transpose(2, 3) / math.sqrt(DIM)
        if scores.size() != (x.shape[0], HEADS, x.shape[1], x.shape[1]):
            raise ValueError(f"scores of shape {scores.size()}")
        return self.result(x, (scores + mask).softmax(-1, dtype=torch.float32).to(q.dtype), v)


class SlicedRotary(Causal):
    """The table is cut to the length of the call and then indexed by position_ids; the mask is written out."""

    layer = SlicedLayer

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(0, length, dtype=torch.long).unsqueeze(0).view(-1, length)
        x = self.embed(input_ids)
        mask = torch.full((length, length), torch.finfo(x.dtype).min)
        row = torch.arange(length)
        mask.masked_fill_(row < (row + 1).view(length, 1), 0)
        for layer in self.layers:
            x = layer(x, mask[None, None], position_ids)
        return self.head(x)


class CausalByLength(SlicedLayer):
    """Whether SDPA shall mask is a comparison of the number of tokens; a call of one needs no mask."""

    def forward(self, x: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        cos, sin = (each[position_ids].unsqueeze(1) for each in self.rotary(v, seq_len=k.shape[-2]))
        q, k = (each * cos + turned(each) * sin for each in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, None, 0.0, q.shape[2] > 1)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class SdpaByLength(SlicedRotary):
    layer = CausalByLength


class ShortSlicedLayer(SlicedLayer):
    rows = 16


class GrownSlicedRotary(SlicedRotary):
    """The same with a table that short calls outgrow."""

    layer = ShortSlicedLayer


class GrowingTable(nn.Module):
    """Plain attributes, made anew when a call is longer than any before it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.cached: list[Tensor] = []

    def grow(self, length: int) -> None:
        if length > self.rows:
            self.rows = max(2 * length, 16)
            inv_freq = 1.0 / 10000 ** (torch.arange(0, DIM, 2).float() / DIM)
            angle = torch.outer(torch.arange(self.rows).float(), inv_freq)
            both = torch.cat((angle, angle), -1)[None, :, None]
            self.cached = [both.cos(), both.sin()]

    def forward(self, length: int) -> list[Tensor]:
        self.grow(length)
        return [each[:, :length] for each in self.cached]


class GrowingLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        seen = torch.tril(torch.ones(POSITIONS, POSITIONS, dtype=torch.bool))
        self.register_buffer("seen", seen[None, None], persistent=False)

    def forward(self, x: Tensor, tables: list[Tensor]) -> Tensor:
        q, k, v = self.heads(x)
        cos, sin = (table[:, -x.shape[1] :].transpose(1, 2) for table in tables)
        q, k = (each * cos + turned(each) * sin for each in (q, k))
        scores = q @ k.transpose(-1, -2) / torch.full([], DIM**0.5)
        seen = self.seen[:, :, k.size(-2) - q.size(-2) : k.size(-2), : k.size(-2)]
        scores = torch.where(seen, scores, torch.full([], torch.finfo(scores.dtype).min))
        return self.result(x, scores.softmax(-1), v)


class GrowingRotary(Causal):
    """The rotary table grows in forward; position_ids are taken and not looked at."""

    layer = GrowingLayer

    def __init__(self) -> None:
        super().__init__()
        self.rotary = GrowingTable()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        tables = self.rotary(x.shape[1])
        for layer in self.layers:
            x = layer(x, tables)
        return self.head(x)


class BufferLayer(Layer):
    def forward(self, x: Tensor, mask: Tensor, table: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = (self.rotated(each, table) for each in (q, k))
        length = x.shape[1]
        buffer = torch.empty(HEADS, length, length, dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(buffer, q[0], k[0].transpose(1, 2), beta=0.0, alpha=1.0 / math.sqrt(DIM))
        return self.result(x, scores[None].masked_fill(mask, float("-inf")).softmax(-1), v)

    def rotated(self, x: Tensor, table: Tensor) -> Tensor:
        """The first half of each head, in pairs of neighbours."""
        part, rest = x.split(DIM // 2, -1)
        pairs, turn = part.unflatten(-1, (-1, 2)), table[:, None]
        (a, b), (cos, sin) = pairs.unbind(-1), turn.unbind(-1)
        return torch.cat((torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(3), rest), -1)


class UninitialisedScores(Causal):
    """baddbmm(empty, q, k, beta=0); a table of rotations [positions, pairs, 2]."""

    layer = BufferLayer

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x, length = self.embed(input_ids), input_ids.shape[1]
        angle = torch.outer(torch.arange(POSITIONS), 1.0 / 10000 ** (torch.arange(0, DIM // 2, 2) / (DIM // 2))).float()
        table = torch.stack((angle.cos(), angle.sin()), -1)
        table = table[None, :length] if position_ids is None else table[position_ids]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril_().logical_not()
        for layer in self.layers:
            x = layer(x, mask, table)
        return self.head(x)


class ConvolvedLayer(SlicedLayer):
    """Keys and values are weighted sums with those of the token before, by head; in a window of 8 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.rand(2, HEADS, 2))

    def forward(self, x: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = (self.convolved(each, taps) for each, taps in zip((k, v), self.taps, strict=True))
        cos, sin = (each[position_ids].unsqueeze(1) for each in self.rotary(v, seq_len=k.shape[-2]))
        q, k = (each * cos + turned(each) * sin for each in (q, k))
        row = torch.arange(x.shape[1])
        mask = mask.masked_fill(row < row[:, None] - 7, torch.finfo(x.dtype).min)
        attended = F.scaled_dot_product_attention(q, k, v, mask)
        return x + self.out(attended.transpose(1, 2).flatten(2))

    def convolved(self, x: Tensor, taps: Tensor) -> Tensor:
        longer = F.pad(x, (0, 0, 1, 0))
        return taps[:, :1, None] * longer[:, :, :-1] + taps[:, 1:, None] * longer[:, :, 1:]


class ConvolvedKeys(SlicedRotary):
    layer = ConvolvedLayer
