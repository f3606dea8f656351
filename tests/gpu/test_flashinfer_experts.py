"""FlashInfer's fused experts: the real kernels beside the float32 reference at published widths. They have not run yet.

FlashInfer 0.6.8.post1 compiles one module for SM90, `fused_moe_90`, for all types at once: 181 sources, 175 of them nvcc's, with 1,214
launchers in 154 generated files. Of those files 36 (280 launchers) are bf16 by bf16. No setting leaves the others out: `use_fast_build`
is not passed on, and defines a macro for the C++ sources alone; `cutlass_fused_moe` asks for the module by the GPU's architecture. The
sources do not say how long it takes. ninja keeps what is compiled, so that a call that ran out of time goes on where it was, as long as
FLASHINFER_WORKSPACE_BASE (by default the home directory) stays. MAX_JOBS: how many compile at once, some gigabytes each;
FLASHINFER_JIT_VERBOSE=1 shows them. So one device call runs these, and then the tests, `-m "slow or not slow"`; if it ends at the
first, it is run again on the same machine:

    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module
    gen_cutlass_fused_moe_sm90_module().build_and_load()

Untuned it runs the first tile that it has; `with flashinfer.autotune(True)` around a first call of each size finds better ones.
"""

from __future__ import annotations

import pytest

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.selection.experts import experts_backend
from paged_attn.backends.selection.packages import unmet_requirements
from tests.gpu.expert_layers import SHAPES, TOKENS, Shape, check_captured, check_numbers, reasons, up_first

NAME = "flashinfer"
lacking = unmet_requirements(experts_backend(NAME).needs.requirements)
pytestmark = [pytest.mark.jit, pytest.mark.slow, pytest.mark.skipif(bool(lacking), reason="; ".join(lacking))]
UP_FIRST = {name: up_first(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", UP_FIRST)
def test_numbers(name: str, tokens: int) -> None:
    assert not reasons(NAME, UP_FIRST[name])
    check_numbers(NAME, UP_FIRST[name], tokens)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", UP_FIRST)
def test_in_a_captured_graph(name: str, tokens: int) -> None:
    check_captured(NAME, UP_FIRST[name], tokens)


def test_weights_as_published_are_refused() -> None:
    assert reasons(NAME, SHAPES["qwen3-30b-a3b"]) == ["its kernels take up before gate, the weights of this layer have gate first"]


@pytest.mark.parametrize("activation", ["relu2", "silu", "gelu_tanh"])
def test_experts_without_a_gate(activation: str) -> None:
    check_numbers(NAME, Shape(16, 2, 256, 128, Gating(activation, False), True), 33)
