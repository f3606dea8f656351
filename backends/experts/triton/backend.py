"""Our own kernels: one for a few tokens, one for any number."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.experts.base import ExpertsBackend
from paged_attn.backends.needs import TRITON, UP_TO_FLOAT32, Needs
from paged_attn.backends.unit_stride import unit_last

FEW_TOKENS = 16
SHARED = 1.27  # average pairs per used expert from which reading it once for all its pairs is faster (docs/design/expert_kernels.md)


def reads_each_pair(tokens: int, top_k: int, experts: int) -> bool:
    """Whether so few tokens, choosing at random, share an expert that each pair of a token and an expert reads the weights separately."""
    chosen = experts * (1 - (1 - min(1, top_k / experts)) ** tokens)
    return tokens <= FEW_TOKENS and tokens * top_k <= SHARED * chosen


class TritonExpertsBackend(ExpertsBackend):
    name = "triton"
    needs: ClassVar[Needs] = Needs(
        devices=frozenset({"cuda", "hip"}),
        dtypes=UP_TO_FLOAT32,
        requirements=(TRITON,),
        note="a few tokens read experts one by one; more are sorted by expert; prompts on Hopper have a kernel of their own",
    )

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating
    ) -> Tensor:
        from paged_attn.backends.experts.triton.few import few_experts
        from paged_attn.backends.experts.triton.grouped import grouped_experts

        given = unit_last(x).to(w1.dtype)
        few = reads_each_pair(len(x), ids.shape[1], len(w2)) and w1.stride(-1) == 1 and w2.stride(2) == 1
        kernel = few_experts if few else grouped_experts
        biases = unit_last(b1), unit_last(b2)
        return kernel(given, ids.contiguous(), weights.contiguous(), w1, w2, *biases, gating).to(x.dtype)

    def compile_ahead(
        self, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating
    ) -> None:
        from paged_attn.backends.compiling.compile_ahead import compiling_ahead
        from paged_attn.backends.experts.triton.grouped import token_counts

        with compiling_ahead(w1.device):
            for tokens in token_counts(w1, ids.shape[1], gating.gated):
                rows, chosen, by = (torch.empty(tokens, each.shape[1], dtype=each.dtype, device=w1.device) for each in (x, ids, weights))
                self.forward(rows, chosen, by, w1, w2, b1, b2, gating)
