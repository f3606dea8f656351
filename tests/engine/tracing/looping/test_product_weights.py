"""Blocks that compute their experts' products themselves are one op each, whatever they store and however they choose rows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams, UnsupportedError, explain
from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.ops.module import MODULE
from paged_attn.engine.tracing.looping.as_ops import looping_experts_as_ops
from tests.engine.tracing.looping import product_blocks as blocks
from tests.engine.tracing.looping.blocks import EXPERTS as COUNT
from tests.engine.tracing.looping.blocks import HIDDEN, Model, greedy
from tests.engine.tracing.looping.product_blocks import Dense
from tests.engine.tracing.looping.test_looping_experts import inputs
from tests.engine.tracing.looping.test_stacked_pair import Pair
from tests.oracle import random_prompts

GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)
PROMPTS = random_prompts((1, 5, 17, 33))
PROVED = [
    "ThreeById", "OwnStacks", "SortedRows", "CalledWithWeights", "ParallelLists", "Gathered", "Dense", "ListOfOwnLinears",
    "CalledWithTheirWeights", "Dispatched", "Unsure", "Padded", "ScaledBefore",
]  # fmt: skip


def ops(llm: LLM, op: Any) -> int:
    return sum(node.target is op for node in llm.engine.runner.compiled.rewrite.gm.graph.nodes)


def stacks_in_steps(llm: LLM) -> int:
    return sum(node.target is torch.cat and len(node.args[0]) > 1 for node in llm.engine.runner.compiled.rewrite.gm.graph.nodes)


@pytest.mark.parametrize("kind", PROVED)
def test_the_models_own_tokens_through_one_op_a_layer(kind: str) -> None:
    model = Model(getattr(blocks, kind)).eval()
    expected = [greedy(model, prompt, 8) for prompt in PROMPTS]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        assert ops(llm, EXPERTS) == 2 and ops(llm, MODULE) == 0 and stacks_in_steps(llm) == 0
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert [greedy(model, prompt, 8) for prompt in PROMPTS] == expected


def test_weights_that_are_written_are_followed() -> None:
    model = Model(blocks.ThreeById).eval()
    with LLM(model, num_pages=64) as llm:
        llm.generate(PROMPTS, GREEDY)
        model.load_state_dict(Model(blocks.ThreeById, seed=5).state_dict())
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [greedy(model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["SortedRows", "Gathered"])
def test_in_bfloat16(kind: str) -> None:
    model = Model(getattr(blocks, kind)).eval().bfloat16()
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:  # the self-check compares its logits with the model's
        assert ops(llm, EXPERTS) == 2
        assert all(len(c.token_ids) == 8 for c in llm.generate(PROMPTS, GREEDY))


def test_places_that_a_crowded_expert_has_not_are_a_capacity() -> None:
    """A token's numbers then depend on how many tokens a call has, so that the block is no op, and the model is refused."""
    model = Model(lambda: blocks.Padded(COUNT - 1)).eval()
    with looping_experts_as_ops(model, inputs) as put:
        assert put == {}
    with pytest.raises(UnsupportedError, match="the logits of a token change as its request grows"):
        LLM(model, num_pages=64)


class OtherSecond(blocks.OwnStacks):
    """The second product is another expert's."""

    def one(self, rows: Tensor, index: int) -> Tensor:
        gate, up = F.linear(rows, self.w1[index]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.w2[(index + 1) % COUNT])


class Between(blocks.OwnStacks):
    """A norm stands between the products."""

    def one(self, rows: Tensor, index: int) -> Tensor:
        gate, up = F.linear(rows, self.w1[index]).chunk(2, -1)
        made = F.silu(gate) * up
        return F.linear(F.rms_norm(made, made.shape[-1:]), self.w2[index])


class FewExperts(blocks.OwnStacks):
    """Its last expert is never asked."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.choose(rows)
        result = torch.zeros_like(rows)
        for index in range(COUNT - 1):
            row, place = torch.where(ids == index)
            if row.numel():
                result.index_add_(0, row, self.one(rows[row], index) * weights[row, place, None])
        return result.view_as(x)


OTHERS: dict[str, Any] = {
    "an unknown gate": lambda: blocks.OwnStacks(torch.cos),
    "a limit that no name tells, and usual numbers never reach": lambda: blocks.OwnStacks(limit=20.0),
    "such a limit between two modules": lambda: Pair(activation=lambda gate: F.silu(gate.clamp(max=20.0))),
    "another expert's second product": OtherSecond,
    "a norm between the products": Between,
    "an expert that is skipped": FewExperts,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_computes_something_else_stays_as_it_is(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(OTHERS[kind]).eval()
    with caplog.at_level(logging.INFO, "paged_attn"), LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        assert ops(llm, EXPERTS) == 0
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [greedy(model, prompt, 8) for prompt in PROMPTS]
        assert "\n  as written   blocks.{0-1} (" in explain(llm)
    assert "blocks.0 (" in caplog.text and "stays as it is: " in caplog.text


def test_explain_says_why_also_of_a_graph_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_ATTN_CACHE", str(tmp_path))
    why = "its experts compute nothing that is known between their products"
    for loaded in (False, True):
        with LLM(Model(WithCosine).eval(), num_pages=64) as llm:
            assert ("loaded from disk" in llm.engine.runner.compiled.rewrite.seconds) == loaded
            assert f"\n  as written   blocks.{{0-1}} (WithCosine) is no op of experts: {why}\n" in explain(llm)


class WithCosine(Dense):
    """Its gate is none that is known; nothing in it branches on data."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.choose(rows)
        of_all = torch.zeros_like(self.gate(rows)).scatter(1, ids, weights)
        gate, up = torch.matmul(rows, self.gate_up).chunk(2, -1)
        return torch.einsum("eth,te->th", torch.cos(gate) * up @ self.down, of_all).view_as(x)


def test_a_hook_keeps_a_block_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(blocks.ThreeById).eval()
    for block in model.blocks:
        block.up_proj.register_forward_hook(lambda module, args, output: output * 2)  # type: ignore[union-attr, operator]
    with caplog.at_level(logging.INFO, "paged_attn"), looping_experts_as_ops(model, inputs) as put:
        assert put == {}
    assert caplog.text.count("(ThreeById) stays as it is: up_proj has hooks or a forward of its own") == 2


def test_weights_that_two_layers_share_stay_where_they_are() -> None:
    model = Model(blocks.ThreeById).eval()
    one, two = model.blocks
    one.up_proj.weight = two.up_proj.weight  # type: ignore[union-attr]
    where = [weight.data_ptr() for weight in model.parameters()]
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        assert ops(llm, EXPERTS) == 0
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [greedy(model, prompt, 8) for prompt in PROMPTS]
    assert [weight.data_ptr() for weight in model.parameters()] == where


def test_other_layers_with_three_dimensions_are_not_taken_for_experts() -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv1d(HIDDEN, HIDDEN, 1), nn.Conv1d(HIDDEN, HIDDEN, 1)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.two(F.silu(self.one(x.transpose(1, 2)))).transpose(1, 2)
            return made

    model = Model(Convolved).eval()
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        assert ops(llm, EXPERTS) == 0
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [greedy(model, prompt, 8) for prompt in PROMPTS]
