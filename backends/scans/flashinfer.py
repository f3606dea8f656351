"""Prompts of the gated delta rule by FlashInfer. Decoding rows use our kernels: theirs need pools of states [V, K].

Source: flashinfer 0.6.8, `flashinfer.gdn_prefill.chunk_gated_delta_rule`: rows [T, heads, 128], contiguous; g is the decay itself, it and
beta are float32; states [N, H, V, K], float32. Trap: nothing reads the argument `use_qk_l2norm_in_kernel`; queries and keys must already
have unit length. Their checkpoints lie at multiples of 64 tokens, ours anywhere, so a prompt is run segment by segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from paged_attn.attn_ops.ops.scans import Kernels
from paged_attn.attn_ops.scans.gated_delta import EPS, gated_delta_extend
from paged_attn.attn_ops.scans.state_rows import Extends, Wave
from paged_attn.backends.needs import FLASHINFER, HALF, Needs
from paged_attn.backends.scans.base import ScanProblem, ScansBackend, run_by_segments

SIZE = 128  # width of keys and values


class FlashInferScans(ScansBackend):
    name = "flashinfer"
    needs: ClassVar[Needs] = Needs(
        devices=frozenset({"cuda"}),
        dtypes=HALF,
        architectures=frozenset({90}),
        requirements=(FLASHINFER,),
        note=f"prompts; keys and values of {SIZE}; compiles at first use (on Blackwell theirs need nvidia-cutlass-dsl: not tried)",
    )
    ops = frozenset({"gated_delta_rule"})

    def unmet(self, problem: ScanProblem) -> list[str]:
        reasons = super().unmet(problem)
        if problem.op in self.ops and problem.state[1:] != (SIZE, SIZE):
            reasons.append(f"keys of {problem.state[1]} and values of {problem.state[2]}, known is {SIZE}")
        return reasons

    def kernels(self) -> Kernels:
        from flashinfer.gdn_prefill import chunk_gated_delta_rule

        def run(given: Sequence[Tensor], wave: Wave, before: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v, decay, learned = given
            result, after = chunk_gated_delta_rule(
                q.contiguous(), k.contiguous(), v.contiguous(), g=decay.float().exp(), beta=learned.float(), scale=q.shape[-1] ** -0.5,
                initial_state=before.float().transpose(2, 3).contiguous(), output_final_state=True, cu_seqlens=wave.ends,
            )  # fmt: skip
            return result, after.transpose(2, 3)

        def kernel(
            query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, output: Tensor, normalise: bool, states: Tensor,
            extends: Extends,
        ) -> bool:  # fmt: skip
            if normalise:
                query, key = _of_unit_length(query), _of_unit_length(key)
            run_by_segments((query, key, value, g, beta), output, states, extends, run)
            return True

        return {gated_delta_extend: kernel}


def _of_unit_length(rows: Tensor) -> Tensor:
    wide = rows.float()
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + EPS)).to(rows.dtype)
