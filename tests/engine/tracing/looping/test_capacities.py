"""Experts that take only so many tokens of a call: what a token gets depends on others, so no op replaces them, however late that shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams, UnsupportedError, explain
from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.engine.tracing.experts_as_ops import proved_experts
from tests.engine.tracing.looping.blocks import CHOSEN, HIDDEN, INNER, Model, Plain, greedy
from tests.engine.tracing.looping.blocks import EXPERTS as NUM_EXPERTS
from tests.engine.tracing.looping.product_blocks import OwnStacks
from tests.oracle import random_prompts

GREEDY = SamplingParams(max_new_tokens=4, ignore_eos=True)
FAR = 130  # more tokens for an expert than other probes give it
PROMPTS = random_prompts((200, 17))


class OfOneExpert(nn.Module):
    """As in Switch Transformers: the expert of a token's best score, unless `limit` tokens before it have the same."""

    def __init__(self, limit: int = FAR) -> None:
        super().__init__()
        self.classifier, self.limit = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False), limit
        self.experts = nn.ModuleDict({f"expert_{index}": Plain() for index in range(NUM_EXPERTS)})
        self.classifier.weight.data.mul_(0.01)[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        scores = self.classifier(x).softmax(-1)
        chosen = F.one_hot(scores.argmax(-1), NUM_EXPERTS)
        chosen = (chosen * (chosen.cumsum(-2) <= self.limit)).bool()
        result = x.clone()
        for index in chosen.flatten(0, 1).sum(0).nonzero()[:, 0].tolist():
            mine = chosen[:, :, index]
            result[mine] = self.experts[f"expert_{index}"](x[mine])
        return scores.max(-1).values.unsqueeze(-1) * result


class Many(nn.Module):
    """Stacked weights, in a loop."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(torch.randn(NUM_EXPERTS, *sizes) * 0.2) for sizes in ((INNER, HIDDEN), (HIDDEN, INNER)))
        self.limit = limit

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for index in range(NUM_EXPERTS):
            row, place = torch.where(ids == index)
            row, place = row[: self.limit], place[: self.limit]
            made = F.linear(F.relu(F.linear(x[row], self.w1[index])), self.w2[index])
            result.index_add_(0, row, made * weights[row, place, None])
        return result


class Limited(nn.Module):
    """The router gives no weight to tokens beyond `limit`."""

    def __init__(self, limit: int = FAR) -> None:
        super().__init__()
        self.gate, self.experts, self.limit = nn.Linear(HIDDEN, NUM_EXPERTS), Many(1 << 20), limit
        self.gate.weight.data.mul_(0.01)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = self.gate(rows).softmax(-1)
        weights, ids = scores.topk(CHOSEN)
        counted = torch.zeros_like(scores).scatter(1, ids, 1.0).cumsum(0)
        kept = (counted <= self.limit).to(scores.dtype).gather(1, ids)
        return self.experts(rows, ids, weights * kept).view_as(x)


@pytest.mark.parametrize("limit", [3, FAR])
def test_a_capacity_in_a_loop_holds_within_each_request(limit: int) -> None:
    """The block runs on all tokens of a request, whose later tokens change no earlier ones."""
    model = Model(lambda: OfOneExpert(limit)).eval()
    with LLM(model, num_pages=64) as llm:
        nodes = llm.engine.runner.compiled.rewrite.gm.graph.nodes
        assert not any(node.target is EXPERTS for node in nodes)
        assert "\n  as written   blocks.{0-1} (OfOneExpert) is no op of experts: " in explain(llm)
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [greedy(model, prompt, 4) for prompt in PROMPTS]


def test_experts_that_no_token_finds_full_are_an_op() -> None:
    """1 << 20 tokens are more than any call has."""
    model = Model(lambda: OfOneExpert(1 << 20)).eval()
    with LLM(model, num_pages=64) as llm:
        assert sum(node.target is EXPERTS for node in llm.engine.runner.compiled.rewrite.gm.graph.nodes) == 2
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [greedy(model, prompt, 4) for prompt in PROMPTS]


class ByLoad(OwnStacks):
    """Prefers experts that fewer tokens of the call before have as their best."""

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(rows).softmax(-1)
        load = F.one_hot(scores.argmax(-1), NUM_EXPERTS).cumsum(0)
        ids = (scores - 0.02 * load).topk(CHOSEN)[1]
        return scores.gather(1, ids), ids


def test_a_router_that_counts_earlier_tokens_runs_on_all_tokens_of_a_request() -> None:
    """Its block is an op at first; then the graph shows that it mixes tokens, and the module that does is the block."""
    model = Model(ByLoad).eval()
    with LLM(model, num_pages=64) as llm:
        assert not any(node.target is EXPERTS for node in llm.engine.runner.compiled.rewrite.gm.graph.nodes)
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [greedy(model, prompt, 4) for prompt in PROMPTS]


@pytest.mark.parametrize(("limit", "proved"), [(20, False), (FAR, False), (2000, False), (1 << 20, True)])
def test_a_capacity_within_a_module_of_stacked_weights(limit: int, proved: bool) -> None:
    assert (proved_experts(Many(limit)) is not None) == proved


def test_a_capacity_of_a_router_is_not_lost_in_an_op() -> None:
    model: Any = Model(Limited).eval()
    with pytest.raises(UnsupportedError, match="other numbers for a token if the batch has other requests"):
        LLM(model, num_pages=64)
