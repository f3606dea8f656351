"""sgl-kernel's pieces behind the contract of experts, through stand-ins that check how they are called (see `fake_triton_kernels`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.experts import experts_one_by_one
from paged_attn.attn_ops.specs.experts import ExpertsSpec, Gating
from paged_attn.backends.experts.base import ExpertsProblem
from paged_attn.backends.experts.sgl_kernel import backend
from paged_attn.backends.selection.experts import reasons_against, select_experts
from tests.backends.experts import fake_triton_kernels
from tests.backends.experts.fake_triton_kernels import FakeTritonKernels
from tests.backends.experts.operands import GATINGS, close, operands
from tests.covering import every_pair

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins compute on a CPU: see tests/gpu/test_sgl_experts.py")
HOPPER = ExpertsProblem(ExpertsSpec(12, 64, 32), torch.bfloat16, "cuda", 90)
SIZES = {"hidden": 48, "width": 24}


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTritonKernels]:
    monkeypatch.setattr("paged_attn.backends.selection.packages.unmet_requirement", lambda need: None)
    kept: Any = (backend._products, backend._fused, backend._gate)
    with fake_triton_kernels.installed() as installed:
        for each in kept:
            each.cache_clear()
        yield installed
        for each in kept:
            each.cache_clear()


def run(*given: Any) -> Tensor:
    return backend.SglKernelExpertsBackend().forward(*given)


def expected(x: Tensor, ids: Tensor, *rest: Any) -> Tensor:
    return experts_one_by_one(x.float(), ids, *(each.float() if isinstance(each, Tensor) else each for each in rest))


@pytest.mark.parametrize(("gating", "tokens", "lies"), every_pair(list(GATINGS), [1, 9], ["in rows", "transposed", "apart"]))
def test_it_gives_the_numbers_of_the_experts_one_by_one(gating: str, tokens: int, lies: str) -> None:
    gate = GATINGS[gating]
    how = {"transposed": lies == "transposed", "apart": lies == "apart" and gate.gated and not gate.interleaved}
    given = operands(tokens, gate, bias=tokens == 9, dtype=torch.bfloat16, **SIZES, **how)
    assert close(run(*given), expected(*given), 0.02)


@pytest.mark.parametrize("top_k", [1, 3])
def test_ids_of_no_expert(top_k: int) -> None:
    """Their rows are written by nobody: the stand-in leaves NaN there."""
    x, ids, weights, *rest = operands(9, Gating(), top_k=top_k, dtype=torch.bfloat16, **SIZES)  # type: ignore[arg-type]
    ids[3], ids[5, 0], ids[8, -1] = 6, 11, 6  # there are six experts
    weights[5, 0] = float("nan")
    result = run(x, ids, weights, *rest)
    assert close(result, expected(x, ids, torch.where(ids < 6, weights, 0), *rest), 0.02) and not result[3].any()
    assert not run(x, ids + 6, weights, *rest).any()


def test_more_pairs_than_one_program_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_attn.backends.experts.triton.grouped.ONE_PROGRAM", 16)
    given = operands(40, Gating(), top_k=2, dtype=torch.bfloat16, **SIZES)  # type: ignore[arg-type]
    assert close(run(*given), expected(*given), 0.02)


def test_no_tokens() -> None:
    assert run(*operands(0, Gating(), dtype=torch.bfloat16, **SIZES)).shape == (0, 48)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gating", "calls"),
    [
        ("interleaved, clamped, alpha", ["matmul_ogs, swiglu", "matmul_ogs"]),
        ("silu", ["matmul_ogs", "silu_and_mul", "matmul_ogs"]),
        ("gelu_tanh", ["matmul_ogs", "gelu_tanh_and_mul", "matmul_ogs"]),
        ("up first", ["matmul_ogs", "matmul_ogs"]),
    ],
)
def test_what_runs(gating: str, calls: list[str], fake: FakeTritonKernels) -> None:
    """gpt-oss' gate is part of the first product, a usual one a kernel of sgl-kernel's, any other PyTorch's."""
    run(*operands(3, GATINGS[gating], dtype=torch.bfloat16, **SIZES))  # type: ignore[arg-type]
    assert fake.calls == calls


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spec": ExpertsSpec(12, 60, 32)}, "a width of 60 is not a multiple of 8"),
        ({"dtype": torch.float32}, "dtype float32"),
        ({"architecture": 80}, "needs SM90, this GPU is SM80"),
        ({"device": "cpu", "architecture": None}, "not on cpu"),
    ],
)
def test_what_it_can_not_run_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        select_experts("sgl_kernel", dataclasses.replace(HOPPER, **changes))


def test_it_is_taken_by_name_alone() -> None:
    assert select_experts("sgl_kernel", HOPPER).name == "sgl_kernel"
    assert {need.module for need in backend.SglKernelExpertsBackend.needs.requirements} == {"sgl_kernel", "triton_kernels", "triton"}
    assert not reasons_against("sgl_kernel", dataclasses.replace(HOPPER, in_rows=False))
    found = select_experts("auto", HOPPER)
    assert found.name == "triton" and "sgl_kernel" not in found.rejected
