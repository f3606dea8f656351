"""Experts by sgl-kernel's wheel: grouped products of `triton_kernels`, which on Hopper read weights by TMA in persistent programs.

In sglang-kernel 0.4.2.post2 a product takes a weight [E, K, N] of any strides. Interleaved gate and up, as in gpt-oss, are activated in the
first product, all others after it. The second product writes a pair's row where it is told to. The package chooses its own tiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.experts.base import ExpertsBackend, ExpertsProblem, odd_widths
from paged_attn.backends.needs import HALF, SGL_KERNEL, TRITON, Needs, Requirement

# Functions of sgl_kernel on rows [gate, up], by our activations.
GATES = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}
ALIGNMENT = 16  # bytes per row must be a multiple of this
SMALLEST_BLOCK = 16  # rows of one expert
SCRATCH = 1 << 20  # bytes; 132 persistent programs have a descriptor of 128 bytes for every tensor that they write by TMA


class SglKernelExpertsBackend(ExpertsBackend):
    name = "sgl_kernel"
    needs: ClassVar[Needs] = Needs(
        devices=frozenset({"cuda"}),
        dtypes=HALF,
        architectures=frozenset({90}),
        requirements=(SGL_KERNEL, Requirement("triton_kernels", "", SGL_KERNEL.install), TRITON),
        note="never taken by itself: not measured; products of triton_kernels, which that wheel brings",
    )

    def unmet(self, problem: ExpertsProblem) -> list[str]:
        return super().unmet(problem) + odd_widths(problem, ALIGNMENT)

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating
    ) -> Tensor:
        from paged_attn.backends.experts.sgl_kernel.sum_kernel import weighted_sum

        if not len(x):  # `matmul_ogs` divides by the number of rows
            return x.new_empty((0, w2.shape[1]))
        products, (experts, hidden, _) = _products(), w2.shape
        given, ids, weights = x.to(w1.dtype).contiguous(), ids.contiguous(), weights.contiguous()
        rows = RowsByExpert.of(ids, experts)
        _hold_scratch(w1.device)
        inner = _first_product(given, w1, b1, gating, rows.routing(ids.shape[1]), products.GatherIndx(rows.pairs, rows.pairs))
        # With one expert per row, rows go where `dst_indx` says. Rows without an expert are not written, and the sum skips them.
        parts = products.matmul_ogs(
            inner, w2.transpose(1, 2), _bias(b2), rows.routing(1), scatter_indx=products.ScatterIndx(ids.view(-1), rows.pairs)
        )  # fmt: skip
        return weighted_sum(parts.view(*ids.shape, hidden), ids, weights, experts).to(x.dtype)


@dataclass(frozen=True)
class RowsByExpert:
    """The metadata of sorted pairs for `matmul_ogs`.

    `pairs` [T k]: the pair of each row; `counts` [E]: rows of each expert; both int32; `metadata`: starts of blocks of rows.
    """

    pairs: Tensor
    counts: Tensor
    metadata: Any

    @classmethod
    def of(cls, ids: Tensor, experts: int) -> RowsByExpert:
        """`ids` [T, k] is contiguous; pairs without an expert come last, where there is no block."""
        from triton_kernels.tensor import make_ragged_tensor_metadata

        from paged_attn.backends.experts.triton.grouped import sorted_pairs

        pairs, _, counts = sorted_pairs(ids, experts, SMALLEST_BLOCK)
        counts = counts[:experts]
        return cls(pairs, counts, make_ragged_tensor_metadata(counts, ids.numel()))

    def routing(self, top_k: int) -> Any:
        """For a product that reads row pair // top_k of its operand when it gathers."""
        return _products().RoutingData(None, self.counts, len(self.counts), top_k, self.metadata)


def _first_product(x: Tensor, w1: Tensor, b1: Tensor | None, gating: Gating, routing: Any, gather: Any) -> Tensor:
    """[T k, I], rows sorted by expert."""
    product, b1 = _products().matmul_ogs, _bias(b1)
    if swiglu := _fused(gating):
        fused: Tensor = product(x, w1.transpose(1, 2), b1, routing, gather, fused_activation=swiglu)
        return fused
    weights = (w1,) if w1.dim() == 3 else w1.unbind(1)
    biases = (None,) * len(weights) if b1 is None else b1.chunk(len(weights), -1)
    first = [product(x, weight.transpose(1, 2), bias, routing, gather) for weight, bias in zip(weights, biases, strict=True)]
    both = first[0] if len(first) == 1 else torch.cat(first, -1)
    return _gate(gating)(both)


def _bias(bias: Tensor | None) -> Tensor | None:
    """The bias in float32: with other dtypes the non-persistent product does not compile."""
    return None if bias is None else bias.float()


@cache
def _products() -> Any:
    from triton_kernels import matmul_ogs

    return matmul_ogs


@cache
def _fused(gating: Gating) -> Any | None:
    """The gate that the first product can fuse: gate * sigmoid(alpha * gate) * (up + 1), with gate and up interleaved."""
    softcaps = gating.gate_softcap or gating.up_softcap
    if not (gating.gated and gating.interleaved and gating.alpha and gating.activation == "silu") or softcaps or gating.up_first:
        return None
    from triton_kernels.specialize import FnSpecs
    from triton_kernels.swiglu import swiglu_fn

    specs = FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2)
    return _products().FusedActivation(specs, (gating.alpha, gating.limit or None))


@cache
def _gate(gating: Gating) -> Callable[[Tensor], Tensor]:
    """sgl_kernel's gate if it has one, else PyTorch's."""
    plain = Gating(gating.activation)
    if gating == plain and gating.activation in GATES:
        import sgl_kernel

        function: Callable[[Tensor], Tensor] = getattr(sgl_kernel, GATES[gating.activation])
        return function
    return gating


def _hold_scratch(device: torch.device) -> None:
    """Makes a stream's memory for descriptors large enough for any product: growing later would free what captured graphs write to."""
    if device.type == "cuda":
        _products().get_per_device_per_stream_alloc_fn(device)(SCRATCH, 128, torch.cuda.current_stream(device).cuda_stream)
