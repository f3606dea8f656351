"""Modules that branch on their data run as one op each, and the rest of the model is captured around them."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.ops.module import MODULE, register_module
from tests.oracle import random_prompts


class Experts(nn.Module):
    """Loops over the experts that got a token."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, 32, 32) * 0.3)
        self.extra = extra

    def forward(self, hidden: Tensor, choice: Tensor, *, weight: Tensor, unused: Any = None) -> Tensor:
        result = torch.zeros_like(hidden)
        for expert in F.one_hot(choice, 4).sum(0).nonzero():
            rows = (choice == expert).nonzero()[:, 0]
            if rows.numel() > 0:
                result.index_add_(0, rows, hidden[rows] @ self.weights[expert[0]] * weight[rows, None])
        return result


class Model(nn.Module):
    def __init__(self, passes: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions, self.head = nn.Embedding(96, 32), nn.Embedding(256, 32), nn.Linear(32, 96)
        self.qkv, self.router, self.experts = nn.Linear(32, 96), nn.Linear(32, 4), Experts()
        self.passes = passes
        for parameter in self.parameters():
            parameter.data.mul_(2.0)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions(position_ids)
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        weight, choice = self.router(x[0]).softmax(-1).max(-1)
        passed = self.passes(x[0]) if callable(self.passes) else self.passes
        return self.head(x + self.experts(x[0], choice, weight=weight, unused=passed)[None])


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_experts_that_loop_over_data_generate() -> None:
    model = Model().eval()
    prompts = random_prompts((1, 5, 17, 33))
    with torch.no_grad(), LLM(model, max_batch_tokens=16, num_pages=64) as llm:
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=8))]
        assert got == [greedy(model, prompt, 8) for prompt in prompts]
        assert "forward" not in vars(model.experts) and not model.experts._forward_hooks
        graph = llm.engine.runner.compiled.rewrite.gm
        assert graph is not None and sum(node.target is MODULE for node in graph.graph.nodes) == 1


def test_rows_around_such_a_module_are_checked_too(caplog: pytest.LogCaptureFixture) -> None:
    """Until 2026-11-30 the module called itself without end where the graph ran while it was made, and that check was left out."""
    with caplog.at_level(logging.INFO, "paged_attn"), LLM(Model().eval(), num_pages=64):
        pass
    assert "values that ops and logits are made of hold a row of each token's own" in caplog.text
    assert "cannot be evaluated" not in caplog.text


def test_what_the_op_can_not_pass_on_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"Experts cannot be traced.* given Tensor, Tensor, Tensor, str .* shaped like one") as told:
        LLM(Model(passes="text").eval(), num_pages=16)
    assert "compile=False" not in str(told.value)  # which takes no plain module


def test_a_mask_is_nothing_that_a_batch_has() -> None:
    model = Model(passes=lambda rows: torch.ones(len(rows), len(rows)).tril()).eval()
    with pytest.raises(UnsupportedError, match="Experts branches on a mask of every pair of tokens of a call, which a batch of several"):
        LLM(model, num_pages=16)


def test_a_module_that_is_gone() -> None:
    number = register_module(nn.Linear(2, 2), lambda module, given: module(*given))
    gc.collect()
    with pytest.raises(ContextError, match="keep the model alive"):
        MODULE([torch.zeros(1, 2)], torch.zeros(1, 2), number)


def test_opcheck() -> None:
    module = nn.Linear(4, 4)
    number = register_module(module, lambda m, given: m(*given))
    given = (([torch.randn(3, 4)]), torch.empty(3, 4), number)
    torch.library.opcheck(MODULE, given, test_utils=("test_schema", "test_faketensor"))
    MODULE(*given)
    assert torch.equal(given[1], module(given[0][0]))


class LooseKeywords(Model):
    """Its **kwargs lead nowhere."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        assert not kwargs, f"unexpected {sorted(kwargs)}"
        return super().forward(input_ids, position_ids)


def test_keywords_are_not_pressed_on_a_plain_module() -> None:
    model, prompts = LooseKeywords().eval(), random_prompts((5,))
    with torch.no_grad(), LLM(model, num_pages=16) as llm:
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=3))]
        assert got == [greedy(model, prompt, 3) for prompt in prompts]
