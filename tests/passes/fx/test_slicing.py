"""The subgraph behind a value, with the writes that reach it, and its evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from paged_attn.passes.fx.slicing import ancestors, evaluate
from tests.passes.graphs import called, graph_of


def part(x: Tensor, y: Tensor) -> Tensor:
    mask = torch.zeros(3)
    mask[1:].add_(x[1:])
    mask.sub_(5)
    other = y * 2
    used = torch.relu(mask)
    mask.mul_(0)
    return used + other


def nodes() -> tuple[fx.Graph, fx.Node, fx.Node, fx.Node]:
    """The graph, its input x, the mask and its first reader."""
    graph = graph_of(part, torch.ones(3), torch.ones(3)).graph
    x = next(node for node in graph.nodes if node.op == "placeholder")
    return graph, x, called(graph, "zeros")[0], called(graph, "relu")[0]


def targets(sliced: list[fx.Node]) -> list[str]:
    return [str(getattr(node.target, "__name__", node.target)) for node in sliced]


def test_writes_before_the_user_belong_to_the_value() -> None:
    graph, x_node, mask, relu = nodes()
    before = ancestors(mask, relu)
    assert targets(before) == [x_node.name.upper()[0] + x_node.name[1:], "zeros", "getitem", "getitem", "add_", "sub_"]
    output = next(node for node in graph.nodes if node.op == "output")
    assert targets(ancestors(mask, output)) == [*targets(before), "mul_"]


def test_what_lies_behind_a_stop_is_left_out() -> None:
    graph, x_node, _, relu = nodes()
    reading = next(node for node in called(graph, "getitem") if node.args[0] is x_node)
    assert x_node in ancestors(relu, relu.next)
    sliced = ancestors(relu, relu.next, frozenset({reading}))
    assert x_node not in sliced and reading in sliced


def test_evaluation_with_literals_replaced_and_inputs_kept() -> None:
    _, x_node, mask, relu = nodes()
    x = torch.tensor([1.0, 2.0, 3.0])

    def smaller(node: fx.Node, value: object) -> object:
        return 1 if node.target == "sub_" and value is node.args[1] else value

    sliced = ancestors(mask, relu)
    assert evaluate(sliced, {x_node: x}, mask).tolist() == [-5, -3, -2]
    assert evaluate(sliced, {x_node: x}, mask, smaller).tolist() == [-1, 1, 2]
    assert x.tolist() == [1, 2, 3]
    with pytest.raises(KeyError):
        evaluate(sliced, {}, mask)


def test_a_given_tensor_that_is_written_is_copied() -> None:
    graph = graph_of(lambda x: x.add_(1), torch.zeros(2)).graph
    add = called(graph, "add_")[0]
    x = torch.zeros(2)
    given = {next(iter(graph.nodes)): x}
    assert evaluate(list(graph.nodes)[:2], given, add).tolist() == [1, 1]
    assert x.tolist() == [0, 0]
