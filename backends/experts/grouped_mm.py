"""Experts by torch's grouped matrix products (`torch.nn.functional.grouped_mm`), over rows sorted by expert."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.experts.base import ExpertsBackend, ExpertsProblem, odd_widths
from paged_attn.backends.needs import Needs

OLDEST = 80  # compute capability, SM80
ALIGNMENT = 16  # bytes; the kernel reads operand rows in pieces of this size


class GroupedMmBackend(ExpertsBackend):
    name = "grouped_mm"
    needs: ClassVar[Needs] = Needs(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.bfloat16}),
        note="what transformers runs; a GPU from SM80 on, widths in multiples of 8",
    )

    def unmet(self, problem: ExpertsProblem) -> list[str]:
        reasons = super().unmet(problem)
        if problem.architecture is not None and problem.architecture < OLDEST:
            reasons.append(f"needs SM{OLDEST} or newer, this GPU is SM{problem.architecture}")
        return reasons + odd_widths(problem, ALIGNMENT)

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating
    ) -> Tensor:
        count, top_k = ids.shape
        experts, order = ids.reshape(-1).sort(stable=True)
        numbers = torch.arange(w1.shape[0], device=ids.device, dtype=experts.dtype)
        ends = torch.searchsorted(experts, numbers, right=True).int()
        own = experts.clamp(max=w1.shape[0] - 1)  # rows without an expert are not computed, and masked below
        rows, parts = x[order // top_k].to(w1.dtype), (w1,) if w1.dim() == 3 else w1.unbind(1)
        products = [torch.nn.functional.grouped_mm(rows, part.transpose(1, 2), offs=ends) for part in parts]
        first = products[0] if len(products) == 1 else torch.cat(products, -1)
        inner = gating(first if b1 is None else first + b1[own])
        second = torch.nn.functional.grouped_mm(inner, w2.transpose(1, 2), offs=ends)
        second = (second if b2 is None else second + b2[own]).float() * weights.reshape(-1, 1)[order].float()
        second = second.masked_fill((experts >= w1.shape[0])[:, None], 0.0)
        return torch.empty_like(second).index_copy_(0, order, second).view(count, top_k, -1).sum(1).to(x.dtype)
