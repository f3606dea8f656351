"""Experts one after the other: the reference for the others, and the usual choice on a CPU."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from paged_attn.attn_ops.ops.experts import experts_one_by_one
from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.experts.base import ExpertsBackend
from paged_attn.backends.needs import UP_TO_FLOAT64, Needs


class OneByOneBackend(ExpertsBackend):
    name = "one_by_one"
    needs: ClassVar[Needs] = Needs(
        devices=frozenset({"cpu", "cuda", "hip", "npu", "xpu"}),
        dtypes=UP_TO_FLOAT64,
        note="for each expert its tokens, added up in float32; waits for the device, so that no CUDA graph can hold it",
    )

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating
    ) -> Tensor:
        return experts_one_by_one(x, ids, weights, w1, w2, b1, b2, gating)
