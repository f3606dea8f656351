"""Products with weights that were repeated for each row: the same numbers, without the copies."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from paged_attn.recurrent.inline.traced.repeated_weights import without_repeated_weights

HEADS, ROWS, OUT, IN = 2, 13, 5, 3
WEIGHT, X = torch.randn(HEADS, OUT, IN), torch.randn(HEADS, ROWS, IN)


def largest(graph: fx.Graph) -> int:
    return max(math.prod(node.meta["val"].shape) for node in graph.nodes if isinstance(node.meta.get("val"), Tensor))


@pytest.mark.parametrize("left", [True, False])
def test_the_weight_is_used_as_it_is(left: bool) -> None:
    def product(weight: Tensor, x: Tensor) -> Tensor:
        return weight[:, None] @ x[..., None] if left else x[:, :, None] @ weight.mT[:, None]

    traced = make_fx(product, tracing_mode="fake")(WEIGHT, X)
    assert largest(traced.graph) >= ROWS * WEIGHT.numel()
    without_repeated_weights(traced.graph, ROWS)
    traced.recompile()
    torch.testing.assert_close(traced(WEIGHT, X), product(WEIGHT, X))
    assert largest(traced.graph) < ROWS * WEIGHT.numel()


def test_a_product_of_two_rows_stays() -> None:
    traced = make_fx(lambda one, other: one[..., None] @ other[:, :, None], tracing_mode="fake")(X, X)
    before = str(traced.graph)
    without_repeated_weights(traced.graph, ROWS)
    assert str(traced.graph) == before
