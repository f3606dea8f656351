"""A slice that `torch.vmap` was traced in runs in the levels of that trace, and leaves them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from paged_attn.passes.fx.slicing import ancestors, evaluate
from tests.passes.graphs import called, graph_of


def near(rows: Tensor, columns: Tensor) -> Tensor:
    """As transformers makes a mask of a function of two positions; then another one, in a level of the same number."""
    close = torch.vmap(torch.vmap(lambda i, j: (i - j).abs() < 3, (None, 0)), (0, None))(rows, columns)
    odd = torch.vmap(lambda i: i % 2 == 1)(rows)
    return torch.relu((close & odd[:, None]).float())


def sliced() -> tuple[list[fx.Node], list[fx.Node], fx.Node]:
    """The nodes behind relu's input, the two inputs among them, and that input."""
    graph = graph_of(near, torch.arange(4), torch.arange(5)).graph
    relu = called(graph, "relu")[0]
    result = relu.all_input_nodes[0]
    nodes = ancestors(result, relu)
    return nodes, [node for node in nodes if node.op == "placeholder"], result


def test_masks_by_vmap_are_evaluated_and_no_level_is_left_over() -> None:
    nodes, inputs, result = sliced()
    rows, columns = torch.tensor([0, 1, 7]), torch.tensor([0, 3, 5, 9])  # other numbers of them than in the trace
    got = evaluate(nodes, dict(zip(inputs, (rows, columns), strict=True)), result)
    assert torch.equal(got, near(rows, columns))
    assert torch._C._functorch.maybe_current_level() is None


def test_levels_are_left_after_an_error() -> None:
    nodes, inputs, result = sliced()

    def wrong(node: fx.Node, value: object) -> object:
        assert isinstance(value, Tensor) or value != 3, "an error among the levels"
        return value

    with pytest.raises(AssertionError, match="among the levels"):
        evaluate(nodes, dict.fromkeys(inputs, torch.arange(3)), result, wrong)
    assert torch._C._functorch.maybe_current_level() is None
