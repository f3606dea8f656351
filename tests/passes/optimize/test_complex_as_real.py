"""Rotations by complex numbers in real arithmetic: the same numbers, and whatever is not known stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from paged_attn import LLM, SamplingParams, explain
from paged_attn.passes.fx.graph_tools import value_of
from paged_attn.passes.optimize.complex_as_real import complex_as_real
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build

Use = Callable[[Tensor, Tensor, Tensor], Any]


class Rotating(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use
        self.register_buffer("table", torch.polar(torch.ones(8, 4), torch.arange(32.0).view(8, 4)), persistent=False)

    def forward(self, x: Tensor, angles: Tensor) -> Any:
        return self.use(x, angles, self.table)


def traced(use: Use) -> tuple[fx.GraphModule, list[Any]]:
    """The graph of a use of x [1, T, 3, 8], angles [T, 4] and a complex table [8, 4], with T symbolic, and its inputs of T = 6."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append((gm, [each.node.hint if isinstance(each, torch.SymInt) else each for each in inputs]))
        return gm.forward

    torch._dynamo.reset()
    x, angles = torch.randn(1, 6, 3, 8), torch.rand(6, 4)
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.mark_dynamic(angles, 0)
    torch.compile(Rotating(use), backend=backend, fullgraph=True)(x, angles)
    return found[0]


def pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def by_polar(x: Tensor, angles: Tensor, table: Tensor) -> Tensor:
    rotation = torch.polar(torch.ones_like(angles), angles) * 1.25
    return torch.view_as_real(pairs(x) * rotation[None, :, None].to(x.device)).flatten(3).type_as(x)


def by_table(x: Tensor, angles: Tensor, table: Tensor) -> Tensor:
    return torch.view_as_real(pairs(x) * table[: x.shape[1]].unsqueeze(1)).flatten(-2)


def backwards(x: Tensor, angles: Tensor, table: Tensor) -> Tensor:
    turned = torch.mul(torch.complex(angles.cos(), angles.sin()).conj().unsqueeze(1), pairs(x).squeeze(0)).transpose(0, 1)
    return torch.view_as_real(turned.contiguous()).sum()


def twice(x: Tensor, angles: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    rotation = torch.polar(angles.exp(), angles).unsqueeze(1)
    return torch.view_as_real(pairs(x) * rotation), torch.view_as_real(pairs(x * 2) * rotation)


def has_complex(gm: fx.GraphModule) -> bool:
    return any(isinstance(value := value_of(node), Tensor) and value.is_complex() for node in gm.graph.nodes if node.op != "placeholder")


@pytest.mark.parametrize("use", [by_polar, by_table, backwards, twice])
def test_numbers_are_the_same(use: Use) -> None:
    gm, inputs = traced(use)
    expected = gm(*inputs)
    assert has_complex(gm) and complex_as_real(gm.graph) >= 4
    gm.graph.lint()
    gm.recompile()
    assert not has_complex(gm)
    torch.testing.assert_close(gm(*inputs), expected, rtol=1e-6, atol=1e-6)


def takes_the_length(x: Tensor, angles: Tensor, table: Tensor) -> Tensor:
    return pairs(x).abs()


def by_a_number(x: Tensor, angles: Tensor, table: Tensor) -> Tensor:
    return torch.view_as_real(pairs(x) * 1j)


def converts(x: Tensor, angles: Tensor, table: Tensor) -> Tensor:
    return torch.view_as_real(pairs(x).to(torch.complex128) * table[:1].to(torch.complex128))


def writes_through(x: Tensor, angles: Tensor, table: Tensor) -> Tensor:
    whole = pairs(x) * table[:1]
    torch.view_as_real(whole).mul_(2)
    return torch.view_as_real(whole)


def gives_one(x: Tensor, angles: Tensor, table: Tensor) -> Tensor:
    return pairs(x) * table[:1]


@pytest.mark.parametrize("use", [takes_the_length, by_a_number, converts, writes_through, gives_one])
def test_what_is_not_known_stays(use: Use) -> None:
    gm, _ = traced(use)
    before = [node.name for node in gm.graph.nodes]
    assert complex_as_real(gm.graph) == 0
    assert [node.name for node in gm.graph.nodes] == before


def test_a_model_that_rotates_so() -> None:
    """Llama 4, whose chunked layers rotate by complex numbers."""
    model, prompts = build("llama4_text"), random_prompts((5, 17, 1))
    with LLM(model, num_pages=64) as llm:
        assert llm.engine.runner.compiled.rewrite.counts["complex_as_real"] == 20
        answers = llm.generate(prompts, SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True))
        assert "20 operations on complex numbers are done in real ones" in explain(llm)
    assert [answer.token_ids for answer in answers] == [greedy(model, prompt, 6) for prompt in prompts]
