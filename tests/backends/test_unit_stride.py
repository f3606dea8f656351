"""Parameters that are columns of others: kernels step through what they take one element at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paged_attn.attn_ops.scans.short_conv import short_conv_step
from paged_attn.attn_ops.scans.state_rows import StateRows
from paged_attn.attn_ops.specs.routing import Routing
from tests.backends.experts.operands import GATINGS, in_float32, operands

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
if not torch.cuda.is_available():
    from paged_attn.backends.experts.triton.backend import TritonExpertsBackend
    from paged_attn.backends.experts.triton.route import route
    from paged_attn.backends.linear.gemv import one_row_linear
    from paged_attn.backends.scans.triton import conv


def column(given: Tensor) -> Tensor:
    return torch.stack([given, torch.full_like(given, 7.0)], -1)[..., 0]


def test_a_bias_of_a_linear_layer() -> None:
    x, weight, bias = torch.randn(1, 24), torch.randn(10, 24), torch.randn(10)
    for given in (column(bias), bias[:1].expand(10)):
        torch.testing.assert_close(one_row_linear(x, weight, given), torch.nn.functional.linear(x, weight, given))


def test_a_bias_of_a_router() -> None:
    logits, bias, routing = torch.randn(5, 12), torch.rand(12), Routing(3, "sigmoid")
    routed = route(logits, column(bias), routing, torch.float32)
    assert routed is not None and torch.equal(routed[1], routing(logits, bias)[1])


@pytest.mark.parametrize("tokens", [3, 40])
def test_biases_of_experts(tokens: int) -> None:
    given = list(operands(tokens, GATINGS["silu"], bias=True))
    expected = in_float32(tuple(given))
    given[5:7] = column(given[5]), column(given[6])
    torch.testing.assert_close(TritonExpertsBackend().forward(*given), expected, atol=1e-4, rtol=1e-4)


def test_a_bias_of_a_convolution() -> None:
    x, weight, bias, states = torch.randn(3, 6), torch.randn(6, 3), torch.randn(6), torch.randn(5, 6, 4)
    rows, expected, found = StateRows(None, torch.tensor([1, 2, 3]), None), torch.zeros(3, 6), torch.zeros(3, 6)
    short_conv_step(x, weight, bias, expected, "silu", (), states.clone(), rows)
    conv.step(x, weight, column(bias), found, "silu", (), states.clone(), rows)
    torch.testing.assert_close(found, expected)
