"""Blocks whose experts' products are two modules with a stacked weight each, given rows sorted by expert, are one op each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.ops.module import MODULE
from paged_attn.engine.tracing.looping.stacked_pair import pair_within
from tests.engine.tracing.looping.blocks import CHOSEN, HIDDEN, INNER, Model, greedy
from tests.engine.tracing.looping.blocks import EXPERTS as NUM_EXPERTS
from tests.oracle import greedy as generated
from tests.oracle import random_prompts
from tests.zoo.build import build

GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)
PROMPTS = random_prompts((1, 5, 17, 33))


class Product(nn.Module):
    """For each group its rows times its expert's matrix."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(NUM_EXPERTS, rows, columns) * columns**-0.5)

    def forward(self, groups: list[tuple[int, int]], rows: Tensor) -> Tensor:
        parts = rows.split([size for _, size in groups])
        return torch.cat([F.linear(part, self.stack[expert]) for (expert, _), part in zip(groups, parts, strict=True)])


class FirstRows(Product):
    """Takes the rows first, as the block calls it."""

    def forward(self, rows: Tensor, groups: list[tuple[int, int]]) -> Tensor:  # type: ignore[override]
        return super().forward(groups, rows)


class Pair(nn.Module):
    """Sorts its tokens by expert, and adds up in place."""

    def __init__(self, gated: bool = True, activation: Any = F.silu, turned: int = 0) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.up, self.down = FirstRows(INNER * (1 + gated), HIDDEN), FirstRows(HIDDEN, INNER)
        self.gated, self.activation, self.turned = gated, activation, turned

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, HIDDEN)
        weights, chosen = self.router(rows).softmax(-1).topk(CHOSEN, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(len(rows), NUM_EXPERTS, dtype=torch.long).scatter(1, chosen, 1).sum(0).tolist()
        inner = self.up(rows[order // CHOSEN], list(enumerate(counts)))
        if self.gated:
            gate, inner = inner.chunk(2, -1)
            inner = self.activation(gate) * inner
        else:
            inner = self.activation(inner)
        other = [((expert + self.turned) % NUM_EXPERTS, count) for expert, count in enumerate(counts)]
        given = self.down(inner, other) * weights.flatten()[order][:, None]
        total = torch.zeros_like(rows).index_add(0, order // CHOSEN, given)
        return total.view(hidden_states.shape) + 0.1


def ops(llm: LLM, op: Any) -> int:
    return sum(node.target is op for node in llm.engine.runner.compiled.rewrite.gm.graph.nodes)


@pytest.mark.parametrize("kind", [{}, {"gated": False, "activation": F.relu}, {"activation": F.gelu}], ids=["silu", "relu", "gelu"])
def test_the_models_own_tokens_through_one_op_a_layer(kind: dict[str, Any]) -> None:
    model = Model(lambda: Pair(**kind)).eval()
    where = [weight.data_ptr() for weight in model.parameters()]
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        assert ops(llm, EXPERTS) == 2 and ops(llm, MODULE) == 0
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [greedy(model, prompt, 8) for prompt in PROMPTS]
    assert [weight.data_ptr() for weight in model.parameters()] == where
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("favourite", [None, 3])
def test_ties_and_an_expert_that_gets_every_token(favourite: int | None) -> None:
    model = Model(Pair).eval()
    for block in model.blocks:
        router: Any = block.router
        router.weight.data.zero_()
        if favourite is not None:
            block.router = nn.Linear(HIDDEN, NUM_EXPERTS)
            block.router.weight.data.mul_(0.01)
            block.router.bias.data = torch.tensor([0.0, 0.0, 5.0, 9.0, 0.0])
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        assert ops(llm, EXPERTS) == 2
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [greedy(model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", [{"turned": 1}, {"activation": torch.cos}], ids=["other experts", "unknown gate"])
def test_what_computes_something_else_stays_as_it_is(kind: dict[str, Any]) -> None:
    """`turned`: the second product of an expert's rows is another expert's."""
    model = Model(lambda: Pair(**kind)).eval()
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        assert ops(llm, EXPERTS) == 0
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [greedy(model, prompt, 8) for prompt in PROMPTS]


def test_jetmoe() -> None:
    model: Any = build("jetmoe")
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        assert ops(llm, EXPERTS) == model.config.num_hidden_layers
        got = llm.generate(PROMPTS, GREEDY)
    assert [completion.token_ids for completion in got] == [generated(model, prompt, 8) for prompt in PROMPTS]


def test_only_modules_that_hold_nothing_else_and_fit_are_a_pair() -> None:
    block: Any = Pair()
    assert pair_within(block) == (block.up, block.down)
    block.up.bias = nn.Parameter(torch.zeros(NUM_EXPERTS, 2 * INNER))
    assert pair_within(block) is None
    block = Pair()
    block.down = FirstRows(HIDDEN, INNER + 1)
    assert pair_within(block) is None
