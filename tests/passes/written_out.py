"""Attention written out in the ways that models write it: functions (q, k, v) -> out on [1, heads, T, 8], all causal.

Modules that own parameters (sinks, bias tables) are classes. `SPELLINGS` maps a name to (the module or function, KV heads of the toy,
what its spec says besides being causal).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN = torch.finfo(torch.float32).min
SCALE = 8**-0.5


def length(q: Tensor) -> int:
    return q.shape[-2]


def mask(q: Tensor) -> Tensor:
    """[T, T], MIN where hidden."""
    return torch.full((length(q), length(q)), MIN).triu(1)


def visible(q: Tensor) -> Tensor:
    return torch.ones(length(q), length(q), dtype=torch.bool).tril()


def repeated(t: Tensor) -> Tensor:
    return t[:, :, None].expand(1, 2, 2, t.shape[2], t.shape[3]).reshape(1, 4, t.shape[2], t.shape[3])


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(2, 3) * SCALE + mask(q), dim=-1) @ v


def float32_cast_and_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = nn.functional.softmax(torch.matmul(q, k.mT) / math.sqrt(8) + mask(q), dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.3, training=False), v)


def scaled_query_and_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.where(visible(q), (q * 0.25) @ k.transpose(-1, -2), -1e9).softmax(-1) @ v


def masked_fill_after_clamp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.max(q @ k.transpose(-1, -2) + mask(q), torch.tensor(MIN)).masked_fill(~visible(q), float("-inf"))
    return torch.softmax(scores, -1) @ v


def multiplied_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """GPT: w * b - 1e4 * (1 - b)."""
    b = visible(q).float()
    return F.softmax((q @ k.transpose(-1, -2)) / math.sqrt(8) * b + -1e4 * (1 - b), -1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores *= SCALE
    scores.masked_fill_(~visible(q), MIN)
    return scores.softmax(dim=-1) @ v


def grouped_5d(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.unflatten(1, (2, 2))
    weights = F.softmax(grouped @ k[:, :, None].transpose(-1, -2) * SCALE + mask(q), -1)
    return (weights @ v[:, :, None]).flatten(1, 2)


def bmm_3d(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.bmm(q[0], k[0].transpose(1, 2)) * SCALE + mask(q)
    return torch.bmm(F.softmax(scores, -1), v[0])[None]


def baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = mask(q)[None].expand(4, -1, -1).baddbmm(q[0], k[0].mT, beta=1.0, alpha=SCALE)
    return torch.bmm(F.softmax(scores, -1), v[0]).view(1, 4, -1, 8)


def baddbmm_into_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ChatGLM2: with beta=0 PyTorch does not read the buffer, which nobody has filled."""
    buffer = torch.full((4, length(q), length(q)), float("nan"))
    scores = torch.baddbmm(buffer, q[0], k[0].mT, beta=0.0, alpha=SCALE)
    return torch.bmm(F.softmax(scores + mask(q), -1), v[0]).view(1, 4, -1, 8)


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * SCALE
    return torch.einsum("bhij,bhjd->bhid", (scores + mask(q)).softmax(dim=-1), v)


def einsum_tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    weights = (torch.einsum("bthd,bshd->bhts", q, k) * SCALE + mask(q.transpose(1, 2))).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, v).transpose(1, 2)


def einsum_grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("bghqd,bgkd->bghqk", q.unflatten(1, (2, 2)), k) * SCALE + mask(q)).softmax(-1)
    return torch.einsum("...ghqk,...gkd->...ghqd", weights, v).flatten(1, 2)


def einsum_groups_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query head g * 2 + h reads KV head h."""
    weights = (torch.einsum("btghd,bshd->bghts", q.transpose(1, 2).unflatten(2, (2, 2)), k.transpose(1, 2)) * SCALE + mask(q)).softmax(-1)
    return torch.einsum("bghts,bshd->btghd", weights, v.transpose(1, 2)).flatten(2, 3).transpose(1, 2)


def heads_in_the_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """BigCode's first code: all heads of a token, one token after the other, against the one KV head."""
    flat = q.transpose(1, 2).reshape(1, -1, 8)
    buffer = torch.full((1, flat.shape[1], length(q)), float("nan"))
    scores = torch.baddbmm(buffer, flat, k[0].mT[None][:, 0], beta=0, alpha=SCALE).view(1, length(q), 4, -1)
    weights = torch.where(visible(q)[None, :, None], scores, torch.full([], MIN)).softmax(-1)
    return torch.bmm(weights.view(1, -1, length(q)), v[:, 0]).view(1, length(q), 4, 8).transpose(1, 2)


def groups_in_the_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All tokens of one query head after those of another, against the KV head of both."""
    scores = (q.reshape(1, 2, -1, 8) @ k.mT * SCALE).view(1, 2, 2, length(q), -1)
    weights = F.dropout((scores + mask(q)).softmax(-1).flatten(2, 3), 0.1, training=False)
    return (weights @ v).reshape(1, 4, -1, 8)


def einsum_key_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.einsum("bhjd,bhid->bhij", k, q) * SCALE + mask(q)).softmax(-1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(q @ repeated(k).transpose(-1, -2) * SCALE / 50.0) * 50.0
    return F.softmax(scores + mask(q), -1) @ repeated(v)


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = visible(q) & visible(q).triu(-4095)
    return torch.where(seen, q @ k.transpose(-1, -2), MIN).softmax(-1) @ v


def slopes(q: Tensor) -> Tensor:
    return 2.0 ** -torch.arange(1, 5)[:, None, None]


def alibi_by_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Bloom: the row's constant is left in."""
    scores = q @ k.transpose(-1, -2) * SCALE + slopes(q) * torch.arange(length(q))
    return F.softmax(scores.masked_fill(~visible(q), MIN), -1) @ v


def alibi_by_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    index = torch.arange(length(q))
    scores = (q @ k.transpose(-1, -2) + slopes(q) * -(index[:, None] - index).abs()) * 0.5
    return F.softmax(scores + mask(q), -1) @ v


def alibi_cut_from_the_end(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """MPT, with the length of its table spelled out: -1 would be one column, which broadcasts."""
    bias = torch.arange(-255, 1).view(1, 1, 1, 256) * slopes(q)
    return F.softmax(q @ k.transpose(-1, -2) * SCALE + bias[..., 256 - length(q) :] + mask(q), -1) @ v


def alibi_in_bfloat16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Falcon: rounded, so that it depends on the key's position."""
    bias = (slopes(q).bfloat16() * torch.arange(length(q)) * 3).float()
    return F.softmax(q @ k.transpose(-1, -2) + bias + mask(q), -1) @ v


def sdpa_with_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    index = torch.arange(length(q))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=slopes(q)[None] * (index - index[:, None]) + mask(q))


def soft_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax with one more in the denominator: a sink that is a constant of the code, in front."""
    return F.softmax(F.pad(q @ k.transpose(-1, -2) * SCALE + mask(q), (1, 0)), dim=-1)[..., 1:] @ v


def head_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([F.softmax(q[0, h] @ k[0, h].T * SCALE + mask(q), -1) @ v[0, h] for h in range(4)])[None]


def one_slope_for_all_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    index = torch.arange(length(q))
    return F.softmax(q @ k.transpose(-1, -2) * SCALE + (index - index[:, None]) * 0.25 + mask(q), -1) @ v


class Sinks(nn.Module):
    """GPT-OSS: a learned column, the row's largest taken off, dropped afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ repeated(k).transpose(-1, -2) * SCALE + mask(q)
        combined = torch.cat([scores, self.sinks.reshape(1, -1, 1, 1).expand(1, -1, length(q), -1)], dim=-1)
        combined = combined - combined.max(dim=-1, keepdim=True).values
        return F.softmax(combined, dim=-1)[..., :-1] @ repeated(v)


class SinksOnTheOutput(Sinks):
    """out * sigmoid(logsumexp(scores) - sink)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ repeated(k).transpose(-1, -2) * SCALE + mask(q)
        scale = (torch.logsumexp(scores, dim=-1) - self.sinks.view(1, -1, 1)).sigmoid()
        return F.softmax(scores, dim=-1) @ repeated(v) * scale[..., None]


class RelativeBias(nn.Module):
    """T5: a learned bias by distance, exact up to 16 and in logarithmic buckets up to 128, constant beyond."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 4)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = torch.arange(length(q))
        distance = (index[:, None] - index).clamp(min=0)
        far = 16 + (torch.log(distance.clamp(min=1).float() / 16) / math.log(128 / 16) * 16).long().clamp(max=15)
        bias = self.table(torch.where(distance < 16, distance, far)).permute(2, 0, 1)[None]
        return F.softmax(q @ k.transpose(-1, -2) + bias + mask(q), -1) @ v


class Stored(nn.Module):
    """nanoGPT: the mask is a buffer of the longest sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.ones(128, 128).tril().view(1, 1, 128, 128))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        return F.softmax(scores.masked_fill(self.bias[:, :, : length(q), : length(q)] == 0, float("-inf")), dim=-1) @ v


def made_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The table is made in each call, for the longest one."""
    seen = torch.ones(128, 128, dtype=torch.uint8).tril()[None, None, : length(q), : length(q)]
    return torch.where(seen.bool(), q @ k.mT * SCALE, torch.tensor(-1e4)).softmax(-1) @ v


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores [keys, queries], and a softmax over the first of them."""
    return F.softmax((q @ k.mT * SCALE + mask(q)).mT, -2).mT @ v


def powers(q: Tensor, k: Tensor) -> Tensor:
    """Of scores whose largest is taken off, 0 where hidden."""
    scores = q @ k.mT * SCALE + mask(q)
    return torch.exp(scores - scores.amax(-1, keepdim=True))


def divided_by_the_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = powers(q, k)
    return e / e.sum(-1, keepdim=True) @ v


def divided_afterwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(q @ repeated(k).mT * SCALE) * visible(q)
    return e @ repeated(v) / e.sum(dim=-1)[..., None]


def divided_and_gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = powers(q, k)
    return (e / e.sum(-1, keepdim=True) @ v) * q.sum(-1, keepdim=True).sigmoid()


def divided_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * SCALE + mask(q)
    scores -= scores.max(-1, keepdim=True).values
    scores.exp_()
    scores /= scores.sum(-1, keepdim=True)
    return scores @ v


def divided_queries_second(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bqhk", q, k) * SCALE
    e = scores.exp().masked_fill(~visible(q)[None, :, None], 0.0)
    return torch.einsum("bqhk,bhkd->bhqd", F.dropout(e / e.sum(-1, keepdim=True), 0.1, False), v)


def log_sum_exp_taken_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * SCALE + mask(q)
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ v


def exp_of_log_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.log_softmax(q @ k.mT * SCALE + mask(q), -1).exp() @ v


def divided_and_a_little(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = powers(q, k)
    return e / (e.sum(-1, keepdim=True) + 1e-8) @ v


def divided_by_one_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Where the largest score is taken off, the one more is its exp(-max)."""
    scores = q @ k.mT * SCALE + mask(q)
    largest = scores.amax(-1, keepdim=True).clamp(min=0)
    e = torch.exp(scores - largest)
    return e / (e.sum(-1, keepdim=True) + torch.exp(-largest)) @ v


def divided_with_softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(torch.tanh(q @ k.mT * SCALE / 50.0) * 50.0 + mask(q))
    return e / e.sum(-1, keepdim=True) @ v


def divided_with_slopes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    index = torch.arange(length(q))
    e = (q @ k.mT + slopes(q) * (index - index[:, None])).exp().tril()
    return e / e.sum(-1, keepdim=True) @ v


def alibi_of_floats(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slopes that are numbers of the code, the last of 8 heads' among them."""
    index = torch.arange(length(q))
    bias = torch.stack([(index - index[:, None]) * slope for slope in (0.5, 0.0625, 0.015625, 0.00390625)])
    return F.softmax(q @ k.mT + bias + mask(q), -1) @ v


def scaled_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A temperature for each head."""
    return F.softmax(q @ repeated(k).mT * torch.tensor([0.25, 0.5, 0.75, 1.0]).view(4, 1, 1) + mask(q), -1) @ repeated(v)


class BoundedTemperature(nn.Module):
    """Cosines of queries and keys, times a learned factor of each head that is bounded by a large number."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor([20.0, 25.0, 30.0, 200.0]).log().view(4, 1, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.logit_scale.exp().clamp(max=100)
        return F.softmax(scores + mask(q), -1) @ v


SPELLINGS: dict[str, tuple[Callable[..., Tensor], int, dict[str, Any]]] = {
    **{
        f.__name__: (f, heads, {"scale": scale})
        for f, heads, scale in (
            (plain, 4, SCALE), (float32_cast_and_dropout, 4, SCALE), (scaled_query_and_where, 4, 1.0), (masked_fill_after_clamp, 4, 1.0),
            (multiplied_mask, 4, SCALE), (in_place, 4, SCALE), (grouped_5d, 2, SCALE), (bmm_3d, 4, SCALE), (baddbmm, 4, SCALE),
            (baddbmm_into_nothing, 4, SCALE),
            (einsum, 4, SCALE), (einsum_tokens_first, 4, SCALE), (einsum_grouped, 2, SCALE),
            (einsum_key_first, 4, SCALE), (heads_in_the_rows, 1, SCALE), (groups_in_the_rows, 2, SCALE),
        )
    },
    **{
        f.__name__: (f, heads, {"scale": SCALE, "has_sinks": sinks})
        for f, heads, sinks in (
            (divided_by_the_sum, 4, False), (divided_afterwards, 2, False), (divided_in_place, 4, False),
            (divided_queries_second, 4, False), (log_sum_exp_taken_off, 4, False), (exp_of_log_softmax, 4, False),
            (divided_and_a_little, 4, False), (divided_and_gated, 4, False), (divided_by_one_more, 4, True),
            (divided_with_softcap, 4, False),
        )
    },
    "divided, with ALiBi": (divided_with_slopes, 4, {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)}),
    "scale by head": (scaled_by_head, 2, {"scale": 1.0}),
    "bounded scale by head": (BoundedTemperature(), 4, {"scale": 100.0}),
    "keys first": (keys_first, 4, {"scale": SCALE}),
    "softcap": (capped, 2, {"softcap": 50.0, "scale": SCALE}),
    "window": (windowed, 4, {"sliding_window": 4096}),
    "ALiBi by key": (alibi_by_key, 4, {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)}),
    "ALiBi by distance": (alibi_by_distance, 4, {"alibi_slopes": (0.25, 0.125, 0.0625, 0.03125), "scale": 0.5}),
    "ALiBi cut from the end": (alibi_cut_from_the_end, 4, {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625), "scale": SCALE}),
    "ALiBi of floats": (alibi_of_floats, 4, {"alibi_slopes": (0.5, 0.0625, 0.015625, 0.00390625)}),
    "one slope": (one_slope_for_all_heads, 4, {"alibi_slopes": (0.25,) * 4}),
    "ALiBi in bfloat16": (alibi_in_bfloat16, 4, {"bias_index": "key", "alibi_slopes": None}),
    "ALiBi through SDPA": (sdpa_with_alibi, 4, {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)}),
    "T5": (RelativeBias(), 4, {"bias_index": "distance"}),
    "sinks": (Sinks(), 2, {"has_sinks": True, "scale": SCALE}),
    "constant sink": (soft_one, 4, {"has_sinks": True}),
    "sinks on the output": (SinksOnTheOutput(), 2, {"gives_lse": True, "has_sinks": False}),
    "stored mask": (Stored(), 4, {"scale": SCALE}),
    "made mask": (made_mask, 4, {"scale": SCALE}),
}  # fmt: skip


class WithPositions(nn.Module):
    """Gives a spelling the arguments of the tests' toy."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return self.inner(q, k, v)
