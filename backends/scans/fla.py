"""Prompts by flash-linear-attention's Triton kernels (`fla-core`). Decoding rows use our kernels: theirs take no slots and would copy
states.

Source: fla-core 0.6.0, `fla.ops.gated_delta_rule.chunk_gated_delta_rule` and `fla.ops.kda.chunk_kda`. Rows [1, T, heads, ..], sequences by
`cu_seqlens` (int64), g in logarithms; states [N, H, K, V], as ours, are read in their dtype and returned in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from paged_attn.attn_ops.install_line import install_line
from paged_attn.attn_ops.ops.scans import Kernels
from paged_attn.attn_ops.scans.gated_delta import gated_delta_extend
from paged_attn.attn_ops.scans.kda import kda_extend
from paged_attn.attn_ops.scans.state_rows import Extends, Wave
from paged_attn.backends.needs import UP_TO_FLOAT32, Needs, Requirement
from paged_attn.backends.scans.base import ScanProblem, ScansBackend, run_by_segments

MOST = 256  # widest key


class FlaScans(ScansBackend):
    name = "fla"
    needs: ClassVar[Needs] = Needs(
        devices=frozenset({"cuda"}),
        dtypes=UP_TO_FLOAT32,
        requirements=(Requirement("fla", "0.6.0", install_line("fla")),),
        note=f"prompts; keys up to {MOST}",
    )
    ops = frozenset({"gated_delta_rule", "kda"})

    def unmet(self, problem: ScanProblem) -> list[str]:
        reasons = super().unmet(problem)
        if problem.op in self.ops and problem.state[1] > MOST:
            reasons.append(f"keys of {problem.state[1]}, at most {MOST}")
        return reasons

    def kernels(self) -> Kernels:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        return {gated_delta_extend: _prompts(chunk_gated_delta_rule), kda_extend: _prompts(chunk_kda)}


def _prompts(chunked: Callable[..., Any]) -> Callable[..., bool]:
    def kernel(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, output: Tensor, normalise: bool, states: Tensor,
        extends: Extends,
    ) -> bool:  # fmt: skip
        def run(given: Sequence[Tensor], wave: Wave, before: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v, decay, learned = (each[None] for each in given)
            result, after = chunked(
                q=q, k=k, v=v, g=decay, beta=learned, scale=q.shape[-1] ** -0.5, initial_state=before.float(), output_final_state=True,
                use_qk_l2norm_in_kernel=normalise, cu_seqlens=wave.ends, cu_seqlens_cpu=wave.ends_on_host,
            )  # fmt: skip
            return result[0], after

        run_by_segments((query, key, value, g, beta), output, states, extends, run)
        return True

    return kernel
