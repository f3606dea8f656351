"""Routers in any spelling become one op that gives their numbers; what no `Routing` gives the numbers of stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.ops.routing import ROUTE
from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.attn_ops.specs.routing import Routing
from paged_attn.passes.fx.graph_tools import as_traced
from paged_attn.passes.optimize.routing import fuse_routing
from tests.passes.graphs import VOCAB, Traced, copied, trace

E, H = 12, 8
Router = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Experts(nn.Module):
    """An embedding, `route(logits [T, 12], bias [12])` to weights and ids [T, k], and twelve experts."""

    def __init__(self, route: Router, dtype: torch.dtype = torch.float32, own: tuple[int, int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.route, self.own = route, own
        self.embed, self.gate = nn.Embedding(VOCAB, H), nn.Linear(H, E, bias=False)
        self.bias, self.w1, self.w2 = (nn.Parameter(torch.randn(*size)) for size in ((E,), (E, 6, H), (E, H, 3)))
        self.to(dtype)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = (self.embed(input_ids) + torch.cos(position_ids[..., None] * 0.1).to(self.embed.weight.dtype))[0]
        weights, ids = self.route(self.gate(x), self.bias)
        w1, w2 = self.w1, self.w2
        if self.own is not None:
            first, count = self.own
            ids, w1, w2 = (ids - first).remainder(E), w1[first : first + count], w2[first : first + count]
        return EXPERTS(x, ids, weights, w1, w2, None, None, *Gating().arguments, "one_by_one")


def softmax_first(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1, dtype=torch.float).topk(3)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), ids


def softmax_of_the_chosen(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    chosen, ids = torch.topk(logits, 2, dim=-1)
    return torch.softmax(chosen, dim=-1), ids


def in_groups(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    choice = scores + bias
    worth = choice.view(-1, 4, 3).topk(2, dim=-1)[0].sum(-1)
    mask = torch.zeros_like(worth)
    mask.scatter_(1, worth.topk(2, dim=-1, sorted=False)[1], 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, 3).reshape(-1, E)
    ids = choice.masked_fill(~mask.bool(), float("-inf")).topk(3, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return (weights * 2.5).type_as(logits), ids


def in_groups_by_sizes(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The same, with the number of rows written out."""
    rows = logits.shape[0]
    scores = logits.float().sigmoid()
    choice = scores.view(rows, -1) + bias
    worth = choice.view(rows, 4, 3).topk(2, dim=-1)[0].sum(-1)
    mask = torch.zeros_like(worth).scatter_(1, worth.topk(2, dim=-1, sorted=False)[1], 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, 3).reshape(rows, -1)
    ids = choice.masked_fill(~mask.bool(), float("-inf")).topk(3, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return (weights * 2.5).type_as(logits), ids


def biased_in_its_own_type(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """In 16 bits it chooses other experts than in float32."""
    scores = logits.sigmoid()
    ids = (scores + bias).topk(5, dim=-1)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-6), ids


def by_sorting(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Its ties fall otherwise."""
    values, order = torch.sort(logits.float().softmax(-1), dim=-1, descending=True)
    return values[:, :2], order[:, :2]


KNOWN: dict[Router, Routing] = {
    softmax_first: Routing(3, renormalise=True),
    softmax_of_the_chosen: Routing(2, "none", "softmax"),
    in_groups: Routing(3, "sigmoid", "none", 4, 2, 2, renormalise=True, eps=1e-20, scale=2.5),
    in_groups_by_sizes: Routing(3, "sigmoid", "none", 4, 2, 2, renormalise=True, eps=1e-20, scale=2.5),
    biased_in_its_own_type: Routing(5, "sigmoid", renormalise=True, eps=1e-6),
}


def squared(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).topk(2)
    return weights * weights, ids


def with_a_capacity(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Only the first 100 tokens of an expert count."""
    weights, ids = logits.softmax(-1).topk(2)
    counted = torch.zeros_like(logits).scatter(1, ids, 1.0).cumsum(0).gather(1, ids)
    return weights * (counted <= 100), ids


def by_the_number_of_rows(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).topk(2)
    return weights * (logits.shape[0] // 20 + 1), ids


def the_worst(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).topk(2, largest=False)
    return weights, ids


def biased_weights(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = (logits.sigmoid() + bias).topk(2)
    return weights, ids


def limited(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.clamp(-50, 50).softmax(-1).topk(2)
    return weights, ids


def of_two_tokens(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = (logits + logits.roll(1, 0)).softmax(-1).topk(2)
    return weights, ids


def fused(module: nn.Module) -> tuple[fx.Graph, int, Any, Any]:
    """The graph with routers that are one op, how many there are, what it computes, and what it computed before."""

    def work(traced: Traced) -> Any:
        gm, _, values = copied(traced)
        count = fuse_routing(gm.graph, values)
        gm.graph.lint()
        gm.recompile()
        args = [as_traced(each) for each in traced.args]
        return gm.graph, count, gm(*args), traced.gm(*args)

    result: tuple[fx.Graph, int, Any, Any] = trace(module, work).result
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("router", KNOWN, ids=lambda router: router.__name__)
def test_a_router_is_one_op(router: Router, dtype: torch.dtype) -> None:
    graph, count, given, expected = fused(Experts(router, dtype))
    (route,) = [node for node in graph.nodes if node.target is ROUTE]
    assert count == 1 and not any(name in str(node.target) for node in graph.nodes for name in ("topk", "sort", "softmax", "sigmoid"))
    known = replace(KNOWN[router], rounded=router is biased_in_its_own_type and dtype == torch.bfloat16)
    assert Routing(*route.args[3:]) == known and (route.args[1] is not None) == (router not in (softmax_first, softmax_of_the_chosen))
    # The model rounds these weights to 16 bits three times, the op once; their products with experts cancel.
    torch.testing.assert_close(given, expected, **({"rtol": 0.016, "atol": 0.03} if known.rounded else {}))


@pytest.mark.parametrize("own", [(0, 4), (4, 4), (8, 4)])
def test_a_router_is_one_op_where_a_rank_has_some_of_the_experts(own: tuple[int, int]) -> None:
    """`paged_attn/parallel/own_experts.py` counts from the rank's first; the op gives the ids of all."""
    graph, count, given, expected = fused(Experts(in_groups, own=own))
    (route,) = [node for node in graph.nodes if node.target is ROUTE]
    assert count == 1 and Routing(*route.args[3:]) == KNOWN[in_groups] and not any("topk" in str(node.target) for node in graph.nodes)
    torch.testing.assert_close(given, expected)
    assert expected[0].any(), "a token has an expert of this rank"


class ScaledInputs(Experts):
    """Llama 4's router, and experts whose inputs are multiplied by its weights, as `dense_experts.py` leaves them."""

    def __init__(self, top_k: int, dtype: torch.dtype) -> None:
        super().__init__(softmax_first, dtype)
        self.top_k = top_k

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = (self.embed(input_ids) + torch.cos(position_ids[..., None] * 0.1).to(self.embed.weight.dtype))[0]
        logits = self.gate(x)
        values, ids = torch.topk(logits, self.top_k, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, ids, values).float().sigmoid().to(x.dtype)
        rows = (x.unsqueeze(1) * torch.gather(scores, 1, ids).unsqueeze(2)).reshape(-1, H)
        each = ids.reshape(-1, 1)
        ones = torch.ones_like(each, dtype=x.dtype)
        return EXPERTS(rows, each, ones, self.w1, self.w2, None, None, *Gating().arguments, "one_by_one").reshape(-1, self.top_k, H).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_router_that_scales_the_inputs_is_one_op(top_k: int, dtype: torch.dtype) -> None:
    graph, count, given, expected = fused(ScaledInputs(top_k, dtype))
    (route,) = [node for node in graph.nodes if node.target is ROUTE]
    assert count == 1 and Routing(*route.args[3:]) == Routing(top_k, "none", "sigmoid")
    assert not any(name in str(node.target) for node in graph.nodes for name in ("topk", "scatter", "sigmoid", "gather"))
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize(
    "router",
    [by_sorting, squared, the_worst, biased_weights, limited, of_two_tokens, with_a_capacity, by_the_number_of_rows],
    ids=lambda router: router.__name__,
)
def test_what_no_routing_gives_the_numbers_of_stays(router: Router) -> None:
    graph, count, given, expected = fused(Experts(router))
    assert count == 0 and all(node.target is not ROUTE for node in graph.nodes)
    torch.testing.assert_close(given, expected)
