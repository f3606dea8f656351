"""Which experts are known, and what is found out about them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn.attn_ops.specs.experts import ExpertsSpec, Gating
from paged_attn.engine.tracing.looping.calls import NotProved
from paged_attn.engine.tracing.looping.expert_mlp import expert_mlps
from tests.engine.tracing.looping.blocks import HIDDEN, INNER, Fused, Gated, Plain

KNOWN: dict[str, tuple[Any, tuple[tuple[str, ...], str], ExpertsSpec]] = {
    "silu": (Gated, (("w1", "w3"), "w2"), ExpertsSpec(3, HIDDEN, INNER, Gating("silu"))),
    "gelu": (lambda: Gated(True, F.gelu), (("w1", "w3"), "w2"), ExpertsSpec(3, HIDDEN, INNER, Gating("gelu"), True)),
    "square": (lambda: Gated(inner=HIDDEN), (("w1", "w3"), "w2"), ExpertsSpec(3, HIDDEN, HIDDEN, Gating("silu"))),
    "fused": (Fused, (("c_fc",), "c_proj"), ExpertsSpec(3, HIDDEN, INNER, Gating("gelu_tanh"), True)),
    "plain": (Plain, (("net.0",), "net.2"), ExpertsSpec(3, HIDDEN, 4 * HIDDEN, Gating("relu", False), True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KNOWN)
def test_what_an_expert_computes_is_found_whatever_its_dtype(kind: str, dtype: torch.dtype) -> None:
    make, where, spec = KNOWN[kind]
    experts = [make().eval().to(dtype) for _ in range(3)]
    found, *_ = expert_mlps(experts)
    assert (found.first, found.second) == where and found.spec == spec and found.gating == spec.gating


def test_operands_are_the_weights_one_expert_behind_the_other() -> None:
    experts = [Gated(bias=True) for _ in range(3)]
    found, *_ = expert_mlps(experts)
    w1, w2, b1, b2 = found.stacked(*found.linears(experts))
    assert b1 is not None and b2 is not None
    for index, expert in enumerate(experts):
        assert torch.equal(w1[index], torch.cat([expert.w1.weight, expert.w3.weight])) and torch.equal(w2[index], expert.w2.weight)
        assert torch.equal(b1[index], torch.cat([expert.w1.bias, expert.w3.bias])) and torch.equal(b2[index], expert.w2.bias)
    assert [len(column) for column in found.columns(experts)] == [6, 3, 6, 3]
    first, second = found.columns(experts)[:2]
    assert first[0] is experts[0].w1.weight and first[1] is experts[0].w3.weight and second[1] is experts[1].w2.weight


class Swapped(Gated):
    """The gate is the one that is called up elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.activation(self.w3(x)) * self.w1(x))


def test_gate_and_up_are_told_apart_by_numbers() -> None:
    assert expert_mlps([Swapped() for _ in range(2)])[0].first == ("w3", "w1")


class Residual(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class OneBias(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.w2 = nn.Linear(INNER, HIDDEN, bias=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Residual, "compute nothing that is known of w1, w3, w2"),
        (lambda: Gated(activation=torch.sin), "compute nothing that is known"),
        (OneBias, "have a bias and some have none"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), "known are two or three layers, and nothing besides"),
    ],
)
def test_others_are_refused_with_the_reason(make: Any, words: str) -> None:
    with pytest.raises(NotProved, match=words):
        expert_mlps([make().eval() for _ in range(2)])
