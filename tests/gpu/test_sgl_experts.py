"""sgl-kernel's pieces as experts: the real kernels beside the float32 reference at published widths, in captured graphs too.

They need sglang-kernel's wheel whole, its package `triton_kernels` included. About 20 kernels compile on first use, 1 to 6 s
each on one core.
"""

from __future__ import annotations

import pytest
import torch

from paged_attn.backends.selection.experts import experts_backend
from paged_attn.backends.selection.packages import unmet_requirements
from tests.backends.experts.operands import GATINGS, close
from tests.gpu.expert_layers import SHAPES, TOKENS, Shape, check_captured, check_numbers, layer_of, reasons, reference, tokens_of

NAME = "sgl_kernel"
lacking = unmet_requirements(experts_backend(NAME).needs.requirements)
pytestmark = pytest.mark.skipif(bool(lacking), reason="; ".join(lacking))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", SHAPES)
def test_numbers(name: str, tokens: int) -> None:
    assert not reasons(NAME, SHAPES[name])
    check_numbers(NAME, SHAPES[name], tokens)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", SHAPES)
def test_in_a_captured_graph(name: str, tokens: int) -> None:
    check_captured(NAME, SHAPES[name], tokens)


@pytest.mark.parametrize("gating", GATINGS)
def test_every_gate(gating: str) -> None:
    check_numbers(NAME, Shape(16, 2, 256, 128, GATINGS[gating], True), 33)


def test_gate_and_up_that_lie_apart() -> None:
    shape = Shape(16, 2, 256, 128)
    layer, given = layer_of(shape), tokens_of(shape, 33)
    apart = layer.w1.view(16, 2, 128, 256).transpose(0, 1).contiguous().transpose(0, 1)
    result = experts_backend(NAME).forward(*given, apart, *layer[1:])
    assert apart.dim() == 4 and close(result, reference(shape, *given), 0.01)


def test_no_tokens_and_half_precision() -> None:
    shape = Shape(16, 2, 256, 128)
    layer, (x, ids, weights) = layer_of(shape), tokens_of(shape, 33)
    empty = experts_backend(NAME).forward(x[:0], ids[:0], weights[:0], *layer)
    assert empty.shape == (0, 256)
    half = [each.half() for each in (x, weights, layer.w1, layer.w2)]
    result = experts_backend(NAME).forward(half[0], ids, half[1], half[2], half[3], None, None, layer.gating)
    assert result.dtype == torch.float16 and close(result, reference(shape, x, ids, weights), 0.01)


@pytest.mark.parametrize("tokens", [1, 64])
def test_no_id_of_an_expert(tokens: int) -> None:
    """As a rank of expert parallelism that has none of the chosen experts: its part of the sum is zeros."""
    shape = Shape(16, 2, 256, 128)
    x, ids, weights = tokens_of(shape, tokens)
    assert not experts_backend(NAME).forward(x, ids + 16, weights, *layer_of(shape)).any()
