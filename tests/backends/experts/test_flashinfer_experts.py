"""FlashInfer's fused experts behind the contract, with a fake of its signature that checks what it is given and computes it."""

from __future__ import annotations

import dataclasses
import enum
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.experts import experts_one_by_one
from paged_attn.attn_ops.specs.experts import ExpertsSpec, Gating
from paged_attn.backends.experts import flashinfer
from paged_attn.backends.experts.base import ExpertsProblem
from paged_attn.backends.selection.experts import reasons_against, select_experts
from paged_attn.engine.tracing.looping.expert_mlp import expert_mlps
from tests.backends.experts.operands import close, operands
from tests.engine.tracing.looping.blocks import Gated

HOPPER = ExpertsProblem(ExpertsSpec(12, 64, 32, Gating(up_first=True)), torch.bfloat16, "cuda", 90)
RUN = {
    "silu": Gating(up_first=True),
    "gelu_tanh": Gating("gelu_tanh", up_first=True),
    "clamped, alpha": Gating("silu", limit=7.0, alpha=1.702, up_first=True),
    "clamped": Gating("silu", limit=0.5, up_first=True),
    "relu2 without a gate": Gating("relu2", False),
    "silu without a gate": Gating("silu", False),
}


class ActivationType(enum.IntEnum):
    Gelu, Relu, Silu, Swiglu, Geglu, SwigluBias, Relu2, Identity = range(8)


PLAIN = {
    ActivationType.Gelu: lambda x: F.gelu(x, approximate="tanh"), ActivationType.Relu: F.relu, ActivationType.Silu: F.silu,
    ActivationType.Relu2: lambda x: F.relu(x).square(), ActivationType.Identity: lambda x: x,
}  # fmt: skip


def cutlass_fused_moe(
    input: Tensor, token_selected_experts: Tensor, token_final_scales: Tensor, fc1_expert_weights: Tensor, fc2_expert_weights: Tensor,
    output_dtype: torch.dtype, quant_scales: list[Tensor], fc1_expert_biases: Tensor | None = None,
    fc2_expert_biases: Tensor | None = None, input_sf: Tensor | None = None, swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None, swiglu_limit: Tensor | None = None, tp_size: int = 1, tp_rank: int = 0, ep_size: int = 1,
    ep_rank: int = 0, cluster_size: int = 1, cluster_rank: int = 0, output: Tensor | None = None, enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False, use_w4_group_scaling: bool = False, use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False, use_packed_weights: bool = False, tune_max_num_tokens: int = 8192, enable_pdl: bool | None = None,
    activation_type: ActivationType = ActivationType.Swiglu, swizzled_input_sf: bool = True,
) -> Tensor:  # fmt: skip
    w1, w2, ids = fc1_expert_weights, fc2_expert_weights, token_selected_experts
    count = w1.shape[0]
    assert ids.dtype == torch.int32 and token_final_scales.dtype == torch.float32 and quant_scales == [] and output is not None
    assert all(each.is_contiguous() for each in (input, ids, token_final_scales, w1, w2)) and int(ids.max()) < count
    assert input.dtype == w1.dtype == output_dtype == output.dtype
    assert all(
        each is None or (each.dtype == torch.float32 and each.shape == (count,)) for each in (swiglu_alpha, swiglu_beta, swiglu_limit)
    )
    given = activation_type in (ActivationType.Swiglu, ActivationType.Geglu)
    assert w1.shape[1] == w2.shape[2] * (1 + given)
    total = torch.zeros(output.shape, device=output.device)
    for token, row in enumerate(input.float()):
        for expert, scale in zip(ids[token].tolist(), token_final_scales[token], strict=True):
            inner = w1[expert].float() @ row + (0.0 if fc1_expert_biases is None else fc1_expert_biases[expert].float())
            if given:
                linear, gate = inner.chunk(2)
                alpha, beta = (
                    fallback if each is None else float(each[expert]) for each, fallback in ((swiglu_alpha, 1.0), (swiglu_beta, 0.0))
                )
                if swiglu_limit is not None:
                    limit = float(swiglu_limit[expert])
                    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
                by = gate * torch.sigmoid(alpha * gate) if activation_type == ActivationType.Swiglu else PLAIN[ActivationType.Gelu](gate)
                inner = by * (linear + beta)
            else:
                inner = PLAIN[activation_type](inner)
            total[token] += scale * (w2[expert].float() @ inner + (0.0 if fc2_expert_biases is None else fc2_expert_biases[expert].float()))
    return output.copy_(total)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    fused, enums = ModuleType("flashinfer.fused_moe"), ModuleType("flashinfer.tllm_enums")
    fused.cutlass_fused_moe, enums.ActivationType = cutlass_fused_moe, ActivationType  # type: ignore[attr-defined]
    for module in (ModuleType("flashinfer"), fused, enums):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("paged_attn.backends.selection.packages.unmet_requirement", lambda need: None)
    flashinfer._package.cache_clear()
    yield
    flashinfer._package.cache_clear()


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("bias", [False, True])
def test_it_gives_the_numbers_of_the_experts_one_by_one(bias: bool, name: str) -> None:
    x, ids, *rest = operands(9, RUN[name], hidden=48, width=24, bias=bias, dtype=torch.bfloat16)
    ids[3], ids[5, 0] = 6, 6  # there are six experts
    assert not reasons_against("flashinfer", dataclasses.replace(HOPPER, spec=ExpertsSpec(6, 48, 24, RUN[name], bias)))
    wide = [each.float() if isinstance(each, Tensor) else each for each in rest]
    result = flashinfer.FlashInferExpertsBackend().forward(x, ids, *rest)
    assert close(result, experts_one_by_one(x.float(), ids, *wide), 0.02) and not result[3].any()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spec": ExpertsSpec(12, 64, 32)}, "its kernels take up before gate, the weights of this layer have gate first"),
        ({"spec": ExpertsSpec(12, 64, 32, Gating(interleaved=True, up_first=True))}, "gate and up take turns"),
        ({"spec": ExpertsSpec(12, 64, 32, Gating(up_softcap=1.0, up_first=True))}, "it has no soft caps"),
        ({"spec": ExpertsSpec(12, 64, 32, Gating("relu", up_first=True))}, r"it has no relu\(gate\) \* up, up first, only silu, gelu_tanh"),
        ({"spec": ExpertsSpec(12, 64, 32, Gating("sigmoid", False))}, "it has no sigmoid, only"),
        ({"spec": ExpertsSpec(12, 60, 32, Gating(up_first=True))}, "a width of 60 is not a multiple of 8"),
        ({"in_rows": False}, "the weights of this layer lie transposed, or gate and up apart"),
        ({"dtype": torch.float32}, "dtype float32"),
        ({"architecture": 80}, "this GPU is SM80"),
    ],
)
def test_what_it_can_not_run_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        select_experts("flashinfer", dataclasses.replace(HOPPER, **changes))


def test_it_is_taken_by_name_alone() -> None:
    assert select_experts("flashinfer", HOPPER).name == "flashinfer"
    found = select_experts("auto", HOPPER)
    assert found.name == "triton" and "flashinfer" not in found.rejected


def test_lists_of_experts_can_be_stacked_its_way_round() -> None:
    """Both orders are known, so that the one is taken that a backend can run."""
    first, second = expert_mlps([Gated() for _ in range(3)])
    assert (first.first, first.gating.up_first) == (("w1", "w3"), False) and (second.first, second.gating.up_first) == (("w3", "w1"), True)
    assert reasons_against("flashinfer", dataclasses.replace(HOPPER, spec=dataclasses.replace(first.spec, hidden=64, inner=32)))
    assert not reasons_against("flashinfer", dataclasses.replace(HOPPER, spec=dataclasses.replace(second.spec, hidden=64, inner=32)))
