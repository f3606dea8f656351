"""Blocks that compute their experts' products themselves, with stacked weights, parallel lists or matrices of all experts' rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.tracing.looping.blocks import CHOSEN, HIDDEN, INNER
from tests.engine.tracing.looping.blocks import EXPERTS as COUNT


def stack(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*sizes) * sizes[-1] ** -0.5)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, COUNT, bias=False)

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.gate(rows).softmax(-1).topk(CHOSEN)
        return weights / weights.sum(-1, keepdim=True), ids

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.choose(rows)
        result = torch.zeros_like(rows)
        for index in range(COUNT):
            row, place = torch.where(ids == index)
            if row.numel():
                result.index_add_(0, row, self.one(rows[row], index) * weights[row, place, None])
        return result.view_as(x)

    def one(self, rows: Tensor, index: int) -> Tensor:
        raise AssertionError(f"no expert {index} for {len(rows)} rows")


class ById(nn.Module):
    """A product of a stacked weight, whose expert is an argument."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight = stack(COUNT, made, given)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return F.linear(x.float(), self.weight[expert].float())


class ThreeById(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.gate_proj, self.down_proj = ById(HIDDEN, INNER), ById(HIDDEN, INNER), ById(INNER, HIDDEN)

    def one(self, rows: Tensor, index: int) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(rows, index)) * self.up_proj(rows, index), index)


class OwnStacks(Routed):
    def __init__(self, activation: Any = F.silu, limit: float = 0.0) -> None:
        super().__init__()
        self.w1, self.w2 = stack(COUNT, 2 * INNER, HIDDEN), stack(COUNT, HIDDEN, INNER)
        self.activation, self.most = activation, limit

    def one(self, rows: Tensor, index: int) -> Tensor:
        gate, up = F.linear(rows, self.w1[index]).chunk(2, -1)
        if self.most:
            gate = gate.clamp(max=self.most)
        return F.linear(self.activation(gate) * up, self.w2[index])


class SortedRows(Routed):
    """Sorts pairs by expert; weights are [.., in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.v1, self.w2 = stack(COUNT, HIDDEN, INNER), stack(COUNT, HIDDEN, INNER), stack(COUNT, INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.choose(rows)
        order = ids.flatten().sort()[1]
        counts = torch.bincount(ids.flatten(), minlength=COUNT).tolist()
        parts = rows.index_select(0, order // CHOSEN).split(counts)
        made = [(F.gelu(part @ self.w1[e]) * (part @ self.v1[e])) @ self.w2[e] for e, part in enumerate(parts)]
        given = torch.cat(made) * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add_(0, order // CHOSEN, given).view_as(x)


class Matrices(nn.Module):
    """Holds the rows of all experts, and is called with each expert's."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.v1, self.w2 = (stack(COUNT * INNER, HIDDEN) for _ in range(3))
        self.num_experts = COUNT

    def forward(self, x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor) -> Tensor:
        return (F.silu(x @ w1.t()) * (x @ v1.t())) @ w2


class CalledWithWeights(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Matrices()

    def one(self, rows: Tensor, index: int) -> Tensor:
        parts = [weight.view(COUNT, INNER, HIDDEN).chunk(COUNT)[index].squeeze(0) for weight in self.mlp.parameters()]
        return self.mlp(rows, *parts)


class ParallelLists(Routed):
    """A list of each product's linear layers, with biases; gates and ups alternate, and are clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_ups = nn.ModuleList(nn.Linear(HIDDEN, 2 * INNER) for _ in range(COUNT))
        self.downs = nn.ModuleList(nn.Linear(INNER, HIDDEN) for _ in range(COUNT))
        self.limit = 2.0

    def one(self, rows: Tensor, index: int) -> Tensor:
        both = self.gate_ups[index](rows)
        gate, up = both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)
        return self.downs[index]((up + 1) * gate * torch.sigmoid(gate * 1.702))


class Gathered(Routed):
    """Takes the weights of each token's experts."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = stack(COUNT, INNER, HIDDEN), stack(COUNT, HIDDEN, INNER), stack(COUNT, INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.choose(rows)
        gate, up = (torch.einsum("th,tkih->tki", rows, weight[ids]) for weight in (self.w1, self.w3))
        made = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.w2[ids])
        return torch.einsum("tkh,tk->th", made, weights).view_as(x)


class Dense(Routed):
    """All experts compute every token; the weights of all but the chosen are zero. With biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.gate_up_bias = stack(COUNT, HIDDEN, 2 * INNER), stack(COUNT, 2 * INNER)
        self.down, self.down_bias = stack(COUNT, INNER, HIDDEN), stack(COUNT, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.choose(rows)
        of_all = torch.zeros(len(rows), COUNT, dtype=x.dtype).scatter_(1, ids, weights)
        gate, up = (torch.bmm(rows.repeat(COUNT, 1).view(COUNT, -1, HIDDEN), self.gate_up) + self.gate_up_bias[:, None]).chunk(2, -1)
        made = torch.bmm(F.silu(gate) * up, self.down) + self.down_bias[:, None]
        return (made * of_all.t()[..., None]).sum(0).view_as(x)


class Linear(nn.Module):
    """None of torch's."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight = stack(made, given)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class OwnLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(HIDDEN, INNER), Linear(INNER, HIDDEN), Linear(HIDDEN, INNER)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ListOfOwnLinears(Routed):
    """Whose router names a class of Python as a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(OwnLinears() for _ in range(COUNT))

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(rows).sigmoid()
        worst = scores.new_ones(scores.shape, dtype=bool).scatter_(1, scores.topk(CHOSEN + 1)[1], False)  # type: ignore[call-overload]
        return scores.masked_fill(worst, float("-inf")).topk(CHOSEN)

    def one(self, rows: Tensor, index: int) -> Tensor:
        made: Tensor = self.experts[index](rows)
        return made


class Weighing(OwnLinears):
    """Multiplies with the weights itself, as the first Mixtral files did."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return weights * super().forward(x)


class CalledWithTheirWeights(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Weighing() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.choose(rows)
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(ids == index)
            result.index_add_(0, row, expert(rows[row], weights[row, place, None]))
        return result.view_as(x)


class Dispatched(Routed):
    """Sends rows to places of each expert by a mask of ones; as many as there are pairs, so that none is lost; zeros fill the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(OwnLinears() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.choose(rows)
        of_all = torch.zeros(len(rows), COUNT, dtype=x.dtype).scatter(1, ids, weights)
        chosen = F.one_hot(ids.t().flatten(), COUNT)
        places = (chosen.cumsum(0) * chosen - 1).view(CHOSEN, -1, COUNT).amax(0)
        sent = F.one_hot(places.clamp(min=0), CHOSEN * len(rows)) * (places >= 0)[..., None]
        parts = torch.einsum("tep,th->eph", sent.to(x.dtype), rows)
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts.chunk(COUNT), strict=True)])
        return torch.einsum("tep,eph->th", of_all[..., None] * sent, made).view_as(x)


class Unsure(Routed):
    """Tokens take no expert (-1) whose score is low."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(OwnLinears() for _ in range(COUNT))

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = super().choose(rows)
        return weights, ids.masked_fill(weights < 0.4, -1)

    def one(self, rows: Tensor, index: int) -> Tensor:
        made: Tensor = self.experts[index](rows)
        return made


class Padded(Routed):
    """Copies rows to places of each expert, `factor` times its share of the tokens; weights are of those with a place."""

    def __init__(self, factor: int = COUNT) -> None:
        super().__init__()
        self.experts, self.factor = nn.ModuleList(OwnLinears() for _ in range(COUNT)), factor

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        tokens = len(rows)
        weights, ids = self.choose(rows)
        capacity = max(1, self.factor * tokens // COUNT)
        flat = ids.t().flatten()
        chosen = F.one_hot(flat, COUNT)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        has_place = place < capacity
        at = flat * capacity + place.clamp(max=capacity - 1)
        buffer = torch.zeros(COUNT * capacity, HIDDEN, dtype=x.dtype)
        buffer[at[has_place]] = rows[torch.arange(tokens).repeat(CHOSEN)[has_place]]
        made = torch.cat([expert(part) for expert, part in zip(self.experts, buffer.chunk(COUNT), strict=True)])
        weights = weights * has_place.view(CHOSEN, tokens).t()
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)
        return (weights[:, None] @ made[at.view(CHOSEN, tokens).t()]).squeeze(1).view_as(x)


class ScaledBefore(Routed):
    """One expert for a token, which is multiplied with its score before."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(OwnLinears() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        best, ids = self.gate(x).max(-1)
        given, result = x * best.sigmoid()[..., None], torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            if (mask := ids == index).any():
                result[mask] = expert(given[mask])
        return result
