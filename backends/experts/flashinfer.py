"""Experts by FlashInfer's `cutlass_fused_moe`: CUTLASS products of sorted rows, two for a layer, as TensorRT-LLM has them.

FlashInfer 0.6.8 takes ids in int32, weights in float32 and biases in the output's type. In gated experts the first product has up before
gate. Ids beyond the experts are only for sharded models. nvcc compiles the kernels on their first use, which takes minutes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.experts.base import ExpertsBackend, ExpertsProblem, odd_widths
from paged_attn.backends.needs import FLASHINFER, HALF, Needs

# Names in FlashInfer's ActivationType, by our activations.
GATED = {"silu": "Swiglu", "gelu_tanh": "Geglu"}
PLAIN = {"gelu_tanh": "Gelu", "relu": "Relu", "silu": "Silu", "relu2": "Relu2", "identity": "Identity"}
ALIGNMENT = 16  # bytes per row must be a multiple of this


class FlashInferExpertsBackend(ExpertsBackend):
    name = "flashinfer"
    needs: ClassVar[Needs] = Needs(
        devices=frozenset({"cuda"}),
        dtypes=HALF,
        architectures=frozenset({90, 100, 103}),
        requirements=(FLASHINFER,),
        note="never taken by itself: nvcc compiles it for minutes; gated experts with up before gate, or lists of them",
    )

    def unmet(self, problem: ExpertsProblem) -> list[str]:
        reasons, gating = super().unmet(problem), problem.spec.gating
        if gating.gated and not gating.up_first:
            reasons.append("its kernels take up before gate, the weights of this layer have gate first")
        if gating.interleaved:
            reasons.append("gate and up take turns in the weights of this layer")
        if gating.gate_softcap or gating.up_softcap:
            reasons.append("it has no soft caps")
        known = GATED if gating.gated else PLAIN
        if gating.activation not in known or ((gating.alpha or gating.limit) and gating.activation != "silu"):
            reasons.append(f"it has no {gating.describe()}, only {', '.join(known)}")
        if not problem.in_rows:
            reasons.append("the weights of this layer lie transposed, or gate and up apart")
        return reasons + odd_widths(problem, ALIGNMENT)

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating
    ) -> Tensor:
        function, activations = _package()
        given = x.to(w1.dtype).contiguous()
        output, none = torch.empty_like(given), ids >= w1.shape[0]
        if not len(given):
            return output.to(x.dtype)
        b1, b2 = (None if bias is None else bias.contiguous() for bias in (b1, b2))
        chosen, scales = ids.clamp(max=w1.shape[0] - 1).to(torch.int32), weights.float().masked_fill(none, 0.0)
        function(
            given, chosen.contiguous(), scales.contiguous(), w1, w2, w1.dtype, [], fc1_expert_biases=b1,
            fc2_expert_biases=b2, output=output, activation_type=activations[(GATED if gating.gated else PLAIN)[gating.activation]],
            **_swiglu(gating, w1.shape[0], w1.device),
        )  # fmt: skip
        return output.to(x.dtype)


@cache
def _package() -> tuple[Any, Any]:
    from flashinfer.fused_moe import cutlass_fused_moe
    from flashinfer.tllm_enums import ActivationType

    return cutlass_fused_moe, ActivationType


@cache
def _swiglu(gating: Gating, experts: int, device: torch.device) -> dict[str, Tensor]:
    """The parameters of a gate other than plain silu, one for each expert; cached, so that captured graphs can read them."""
    if not gating.gated or not (gating.alpha or gating.limit):
        return {}
    numbers = {"swiglu_alpha": gating.alpha or 1.0, "swiglu_beta": 1.0 if gating.alpha else 0.0}
    if gating.limit:
        numbers["swiglu_limit"] = gating.limit
    return {name: torch.full((experts,), value, dtype=torch.float32, device=device) for name, value in numbers.items()}
