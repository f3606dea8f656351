"""Experts that all compute every token become one op of the chosen ones where the numbers are the same; what is anything else stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.specs.experts import ExpertsSpec, Gating
from paged_attn.passes.fx.call_form import ReadValues
from paged_attn.passes.optimize.dense_experts import replace_dense_experts
from tests.oracle import greedy, random_prompts
from tests.passes.graphs import VOCAB, Traced, called, copied, trace
from tests.tiny_models import build

E, H, INNER = 5, 8, 6
Score = Callable[[Tensor], Tensor]
Between = Callable[[Tensor], Tensor]


def sigmoid_of_the_best(k: int) -> Score:
    def score(logits: Tensor) -> Tensor:
        values, ids = torch.topk(logits, k, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, ids, values)
        return torch.sigmoid(scores.float()).to(scores.dtype)

    return score


def silu_first(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return up * F.silu(gate)


def gelu_taking_turns(both: Tensor) -> Tensor:
    return F.gelu(both[..., ::2], approximate="tanh") * both[..., 1::2]


class Dense(nn.Module):
    """An embedding, a router, and five experts of all tokens, as Llama 4 writes them."""

    def __init__(self, score: Score, between: Between, halves: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score, self.between = score, between
        self.embed, self.router = nn.Embedding(VOCAB, H), nn.Linear(H, E, bias=False)
        self.w1, self.w2 = (nn.Parameter(torch.randn(*size) * 0.3) for size in ((E, H, halves * INNER), (E, INNER, H)))
        self.to(dtype)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = (self.embed(input_ids) + torch.cos(position_ids[..., None] * 0.1).to(self.embed.weight.dtype)).reshape(-1, H)
        scores = self.score(self.router(x))
        return self.weighted(self.experts(x.repeat(E, 1) * self.of_rows(scores)), scores) + x

    def of_rows(self, scores: Tensor) -> Tensor:
        return scores.transpose(0, 1).reshape(-1, 1)

    def experts(self, rows: Tensor) -> Tensor:
        return torch.bmm(self.between(torch.bmm(rows.view(E, -1, H), self.w1)), self.w2).view(-1, H)

    def weighted(self, made: Tensor, scores: Tensor) -> Tensor:
        return made.reshape(E, -1, H).sum(dim=0)


class Afterwards(Dense):
    """Scores multiply what the experts make of the token."""

    def of_rows(self, scores: Tensor) -> Tensor:
        return torch.ones_like(scores.transpose(0, 1).reshape(-1, 1))

    def weighted(self, made: Tensor, scores: Tensor) -> Tensor:
        return (made.reshape(E, -1, H) * scores.t()[..., None]).sum(dim=0)


class Shifted(Dense):
    """Experts that make something of nothing."""

    def experts(self, rows: Tensor) -> Tensor:
        return torch.bmm(self.between(torch.bmm(rows.view(E, -1, H), self.w1) + 0.5), self.w2).view(-1, H)


def both(module: nn.Module) -> tuple[int, fx.Graph, Tensor, Tensor]:
    """How many layers are one op, the graph, and its result beside the module's own."""

    def rewritten(traced: Traced) -> tuple[Any, ...]:
        gm, _, values = copied(traced)
        seen, asked = ReadValues(values), list[ExpertsSpec]()
        count = replace_dense_experts(gm.graph, seen, lambda spec, weight: asked.append(spec) or "one_by_one")
        gm.graph.lint()
        gm.recompile()
        assert not seen.read and len(asked) == count
        return count, gm.graph, gm(*traced.args)[0], traced.gm(*traced.args)[0]

    return trace(module, rewritten).result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(
    ("between", "halves", "gating"),
    [(silu_first, 2, Gating()), (gelu_taking_turns, 2, Gating("gelu_tanh", True, True)), (F.relu, 1, Gating("relu", False))],
)
def test_it_gives_the_same_numbers(between: Between, halves: int, gating: Gating, k: int, dtype: torch.dtype) -> None:
    count, graph, given, expected = both(Dense(sigmoid_of_the_best(k), between, halves, dtype))
    assert count == 1 and not called(graph, "bmm") and not called(graph, "repeat")
    (node,) = [node for node in graph.nodes if node.target is EXPERTS]
    assert node.args[7:] == (*gating.arguments, "one_by_one")
    assert (given - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.05) * expected.abs().max()


LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    "all experts count": lambda: Dense(lambda logits: logits.topk(2).values.sum(-1, keepdim=True) * logits.softmax(-1), silu_first),
    "an activation that nobody knows": lambda: Dense(
        sigmoid_of_the_best(1), lambda both: both.chunk(2, -1)[0].sin() * both.chunk(2, -1)[1]
    ),
    "a limit that few rows meet": lambda: Dense(
        sigmoid_of_the_best(1), lambda both: F.silu(both.chunk(2, -1)[0]).clamp(max=9) * both.chunk(2, -1)[1]
    ),
    "scores after the experts": lambda: Afterwards(sigmoid_of_the_best(2), silu_first),
    "something of nothing": lambda: Shifted(sigmoid_of_the_best(1), silu_first),
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_what_computes_something_else_stays(why: str) -> None:
    count, graph, given, expected = both(LEFT_ALONE[why]())
    assert count == 0 and len(called(graph, "bmm")) == 2 and torch.equal(given, expected)


def test_llama_4_gives_its_own_tokens_and_says_so() -> None:
    model, prompts = build("llama4_text", num_experts_per_tok=2), random_prompts((1, 5, 17))
    expected = [greedy(model, prompt, 8) for prompt in prompts]
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        found = llm.engine.runner.compiled.rewrite
        assert sum(found.experts.values()) == 1 and found.experts == {"one_by_one": 1}
        assert [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=8))] == expected
    with LLM(model, num_pages=64, disable_passes=("experts",)) as llm:
        assert not llm.engine.runner.compiled.rewrite.experts
