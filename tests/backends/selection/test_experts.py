"""Backends for experts behind their contract: the same numbers from each, and one taken, or a refusal that says why."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paged_attn import LLM, SamplingParams, explain
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.experts import EXPERTS, experts_one_by_one
from paged_attn.attn_ops.specs.experts import ExpertsSpec, Gating
from paged_attn.backends.experts.base import ExpertsProblem
from paged_attn.backends.selection.experts import BUILT_IN, experts_backend, reasons_against, select_experts
from tests.backends.experts.operands import GATINGS, close, operands
from tests.oracle import random_prompts
from tests.zoo.build import build

CPU = ExpertsProblem(ExpertsSpec(12, 64, 32), torch.float32, "cpu")
HOPPER = dataclasses.replace(CPU, dtype=torch.bfloat16, device="cuda", architecture=90)


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 7])
def test_grouped_mm_gives_the_numbers_of_the_experts_one_by_one(tokens: int, bias: bool, gating: str) -> None:
    given = operands(tokens, GATINGS[gating], hidden=48, width=24, bias=bias, transposed=bias, dtype=torch.bfloat16)
    expected = experts_one_by_one(
        *(each.float() if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in given)
    )
    assert close(experts_backend("grouped_mm").forward(*given), expected, 0.02)


@pytest.mark.parametrize("bias", [False, True])
def test_grouped_mm_takes_gate_and_up_that_lie_apart(bias: bool) -> None:
    apart, together = (operands(7, Gating(), width=24, bias=bias, apart=apart, dtype=torch.bfloat16) for apart in (True, False))
    backend = experts_backend("grouped_mm")
    assert apart[3].dim() == 4 and close(backend.forward(*apart), backend.forward(*together), 0.01)


def test_ids_of_no_expert_count_as_none() -> None:
    x, ids, *rest = operands(9, Gating(), hidden=48, width=24, bias=True, dtype=torch.bfloat16)
    ids[3], ids[5, 0] = 6, 6  # there are six experts
    result = experts_backend("grouped_mm").forward(x, ids, *rest)
    assert close(result, experts_one_by_one(x, ids, *rest), 0.02)
    assert not result[3].any()


def test_each_takes_what_is_asked_of_it_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_attn.backends.selection.packages.unmet_requirement", lambda need: None)
    assert (
        select_experts("auto", HOPPER).describe() == "triton (not taken: grouped_mm: ranked after triton; one_by_one: ranked after triton)"
    )
    assert select_experts("auto", dataclasses.replace(HOPPER, dtype=torch.float64)).name == "one_by_one"
    assert select_experts("auto", CPU).name == select_experts("auto", dataclasses.replace(CPU, device="cpu-amx")).name == "one_by_one"
    assert select_experts("grouped_mm", HOPPER).rejected["triton"] == "asked for another by name"
    odd = dataclasses.replace(HOPPER, spec=ExpertsSpec(12, 60, 32))
    assert reasons_against("grouped_mm", odd) == ["a width of 60 is not a multiple of 8"]
    turing = dataclasses.replace(HOPPER, architecture=75)
    assert reasons_against("grouped_mm", turing) == ["needs SM80 or newer, this GPU is SM75"]
    monkeypatch.setattr("paged_attn.backends.selection.packages.unmet_requirement", lambda need: f"{need.module} is not installed")
    selection = select_experts("auto", HOPPER)
    assert selection.name == "grouped_mm" and selection.rejected["triton"] == "triton is not installed"


def test_a_refusal_says_what_fits() -> None:
    with pytest.raises(UnsupportedError, match=r"12 experts of 64 x 32, silu\(gate\) \* up with experts_backend='triton'(.|\n)*not on cpu"):
        select_experts("triton", CPU)
    with pytest.raises(UnsupportedError, match=r"What fits: one_by_one\. Try experts_backend='auto'"):
        select_experts("grouped_mm", CPU)
    with pytest.raises(ValueError, match="unknown experts_backend 'acme'; known are 'auto', 'triton', 'grouped_mm', 'one_by_one'"):
        select_experts("acme", CPU)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_class_has_the_name_it_is_registered_by(name: str) -> None:
    assert experts_backend(name).name == name


@pytest.mark.parametrize("name", ["auto", "grouped_mm"])
def test_an_engine_takes_the_one_that_is_set_and_says_so(name: str) -> None:
    model = build("qwen3_moe").to(torch.bfloat16)
    with LLM(model, num_pages=64, experts_backend=name) as llm:
        graph = llm.engine.runner.compiled.rewrite.gm.graph
        taken = {node.args[-1] for node in graph.nodes if node.target is EXPERTS}
        assert taken == {"one_by_one" if name == "auto" else name}
        assert f"layers of experts are one op each, by {taken.pop()}" in explain(llm)
        assert all(
            len(each.token_ids) == 4 for each in llm.generate(random_prompts((3, 9)), SamplingParams(max_new_tokens=4, ignore_eos=True))
        )


def test_an_engine_refuses_what_can_not_run() -> None:
    with pytest.raises(UnsupportedError, match=r"experts_backend='grouped_mm'(.|\n)*dtype float32 is not among bfloat16"):
        LLM(build("qwen3_moe"), num_pages=64, experts_backend="grouped_mm")
