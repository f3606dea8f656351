"""Blocks of experts as remote code writes them, each with a loop of its own over a list of modules, and a small model around them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, INNER, EXPERTS, CHOSEN, VOCABULARY = 32, 24, 5, 2, 96


class Gated(nn.Module):
    """gate, up and down under names that say nothing."""

    def __init__(self, bias: bool = False, activation: Any = F.silu, inner: int = INNER) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, inner, bias=bias), nn.Linear(HIDDEN, inner, bias=bias)
        self.w2, self.activation = nn.Linear(inner, HIDDEN, bias=bias), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


class Fused(nn.Module):
    """Gate and up in one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(HIDDEN, 2 * INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.c_fc(x).chunk(2, -1)
        return self.c_proj(F.gelu(gate, approximate="tanh") * up)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.ReLU(), nn.Linear(4 * HIDDEN, HIDDEN), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class OneHotLoop(nn.Module):
    """Loops over all experts and picks each one's tokens out of a mask; returns its router's logits, too."""

    def __init__(self, expert: Any = Gated) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        hidden_states = hidden_states.view(-1, width)
        logits = self.gate(hidden_states)
        weights = F.softmax(logits, dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, CHOSEN, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(hidden_states.dtype)
        result = torch.zeros((batch * length, width), dtype=hidden_states.dtype, device=hidden_states.device)
        mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for index in range(EXPERTS):
            place, row = torch.where(mask[index])
            current = hidden_states[None, row].reshape(-1, width)
            made = self.experts[index](current) * weights[row, place, None]
            result.index_add_(0, row, made.to(hidden_states.dtype))
        return result.reshape(batch, length, width), logits


class Router(nn.Module):
    """All scores but those of the chosen are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best, ids = self.linear(x).topk(CHOSEN, dim=-1)
        hidden = torch.full_like(self.linear(x), float("-inf"))
        return F.softmax(hidden.scatter(-1, ids, best), dim=-1), ids


class MaskedLoop(nn.Module):
    """Asks of every expert whether any token wants it; scores of all experts."""

    def __init__(self, expert: Any = Plain) -> None:
        super().__init__()
        self.router, self.experts = Router(), nn.ModuleList(expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x)
        result = torch.zeros_like(x)
        flat, flat_scores = x.view(-1, x.size(-1)), scores.view(-1, scores.size(-1))
        for index, expert in enumerate(self.experts):
            mask = (ids == index).any(dim=-1)
            if mask.any():
                made = expert(flat[mask.view(-1)]) * flat_scores[mask.view(-1), index].unsqueeze(1)
                result[mask] += made.squeeze(1)
        return result


class SharedExpert(OneHotLoop):
    """Adds what one expert more makes of every token, through a gate of its own; chosen weights are not renormalised."""

    def __init__(self, expert: Any = Gated) -> None:
        super().__init__(expert)
        self.shared, self.shared_gate = Gated(inner=40), nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        rows = hidden_states.view(-1, HIDDEN)
        weights, chosen = torch.topk(F.softmax(self.gate(rows), dim=1, dtype=torch.float), CHOSEN, dim=-1)
        weights = weights.to(rows.dtype)
        result = torch.zeros_like(rows)
        hit = F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero()
        for index in hit[:, 0].tolist():
            row, place = torch.where(chosen == index)
            result.index_add_(0, row, self.experts[index](rows[row]) * weights[row, place, None])
        result = result + torch.sigmoid(self.shared_gate(rows)) * self.shared(rows)
        return result.view(hidden_states.shape)


class Sorted(nn.Module):
    """Sorts pairs by expert, with counts on the host; a router with a bias in the choice, and a factor."""

    def __init__(self, expert: Any = Gated) -> None:
        super().__init__()
        self.gate, self.shared = nn.Linear(HIDDEN, EXPERTS, bias=False), Gated(inner=40)
        self.register_buffer("correction", torch.randn(EXPERTS) * 0.1)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        identity, shape, x = x, x.shape, x.view(-1, HIDDEN)
        scores = F.linear(x.float(), self.gate.weight.float()).sigmoid()
        ids = torch.topk(scores + self.correction[None], CHOSEN, dim=-1, sorted=False)[1]
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
        counts = ids.new_zeros((ids.shape[0], EXPERTS)).scatter_(1, ids, 1).sum(dim=0).cpu().numpy()
        order = ids.view(-1).argsort()
        rows, made, start = x[order // ids.shape[1]], [], 0
        for index, count in enumerate(counts):
            if count:
                made.append(self.experts[index](rows[start : start + count]))
                start += count
        outs = torch.cat(made, dim=0)
        back = torch.empty_like(outs)
        back[order] = outs
        total = back.view(*ids.shape, -1).type(weights.dtype).mul_(weights.unsqueeze(dim=-1)).sum(dim=1).type(back.dtype)
        return total.view(*shape) + self.shared(identity)


class List(nn.ModuleList):
    """A list that is called itself, with ids and weights."""

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for index in ids.unique().tolist():
            row, place = torch.where(ids == index)
            result.index_add_(0, row, self[index](tokens[row]) * weights[row, place, None])
        return result


class CalledList(nn.Module):
    def __init__(self, expert: Any = Gated) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, EXPERTS), List(expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.gate(rows).topk(CHOSEN)
        return self.experts(rows, ids, weights=weights.softmax(-1)).view_as(x)


class ByHits(OneHotLoop):
    """Loops over the experts that got a token, which index the list as tensors, between a norm and a factor of its own."""

    def __init__(self, expert: Any = Gated) -> None:
        super().__init__(expert)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        rows = self.norm(hidden_states).flatten(0, 1)
        weights, chosen = self.gate(rows).topk(CHOSEN)
        weights, result = weights.sigmoid(), torch.zeros_like(rows)
        mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for index in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            place, row = torch.where(mask[index].squeeze(0))
            result[row] += self.experts[index](rows[row]) * weights[row, place, None]
        result.mul_(0.5)
        return result.view_as(hidden_states) + hidden_states, None


class OneExpert(OneHotLoop):
    """One expert for a token, in an expert's place by a mask; the weight is multiplied at the end."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        best, ids = self.gate(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            if (mask := ids == index).any():
                result[mask] = expert(x[mask])
        return result * best.unsqueeze(-1)


class Capacity(OneHotLoop):
    """An expert takes no more than so many tokens: what a token gets depends on others."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        rows = hidden_states.view(-1, HIDDEN)
        weights, chosen = self.gate(rows).softmax(-1).topk(CHOSEN)
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            row, place = row[:20], place[:20]
            result.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return result.view(hidden_states.shape)


class Model(nn.Module):
    """Attention and a block, twice."""

    def __init__(self, block: Any, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.positions, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(256, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, 3 * HIDDEN) for _ in range(2))
        self.blocks = nn.ModuleList(block() for _ in range(2))
        for parameter in self.parameters():
            parameter.data.mul_(2.0)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions(position_ids)
        for qkv, block in zip(self.qkv, self.blocks, strict=True):
            q, k, v = (part.unflatten(-1, (4, HIDDEN // 4)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            made = block(F.rms_norm(x, (HIDDEN,)))
            x = x + (made[0] if isinstance(made, tuple) else made)
        return self.head(x)


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    """The model's own greedy tokens, of the whole row each time."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1].argmax()))
    return ids[len(prompt) :]
