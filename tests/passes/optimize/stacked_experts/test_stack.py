"""Weights that a graph stacks for its experts lie stacked in its caller's memory instead."""

from __future__ import annotations

import torch
from torch import fx

from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.passes.optimize.linears.merge import Merge
from paged_attn.passes.optimize.stacked_experts import keep_stacked

SHAPES = {"x": (4, 8), "ids": (4, 2), "weights": (4, 2), **{f"up{i}": (6, 8) for i in range(3)}, **{f"down{i}": (8, 6) for i in range(3)}}


def stacking(used_elsewhere: bool = False) -> tuple[fx.Graph, dict[str, fx.Node]]:
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in SHAPES}
    for name, node in nodes.items():
        node.meta["example_value"] = torch.zeros(SHAPES[name], dtype=torch.int64 if name == "ids" else torch.float32)
    views = []
    for kind, (rows, columns) in (("up", (6, 8)), ("down", (8, 6))):
        stack = graph.call_function(torch.cat, ([nodes[f"{kind}{i}"] for i in range(3)],))
        stack.meta["example_value"] = torch.zeros(3 * rows, columns)
        views.append(graph.call_method("view", (stack, 3, rows, columns)))
    call = (nodes["x"], nodes["ids"], nodes["weights"], *views, None, None, *Gating("relu", False).arguments, "one_by_one")
    result = graph.call_function(EXPERTS, call)
    graph.output((result, nodes["up1"]) if used_elsewhere else result)
    return graph, nodes


def test_the_first_input_takes_all_and_nothing_is_copied_in_a_step() -> None:
    graph, nodes = stacking()
    before = fx.GraphModule({}, fx.Graph())
    before.graph = stacking()[0]
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()} | {"ids": torch.tensor([[0, 1], [2, 0], [1, 2], [1, 0]])}
    expected = before(**values)
    merges = keep_stacked(graph, {node: values[name] for name, node in nodes.items()})
    assert merges == (Merge((3, 4, 5), (6,) * 3), Merge((6, 7, 8), (8,) * 3))
    assert not any(node.target is torch.cat for node in graph.nodes) and nodes["up0"].meta["example_value"].shape == (18, 8)
    merged = {f"{kind}0": torch.cat([values[f"{kind}{i}"] for i in range(3)]) for kind in ("up", "down")}
    assert torch.equal(fx.GraphModule({}, graph)(**values | merged), expected)


def test_a_weight_that_is_used_elsewhere_stays_where_it_is() -> None:
    graph, nodes = stacking(used_elsewhere=True)
    (merge,) = keep_stacked(graph, dict.fromkeys(nodes.values()))
    assert merge.inputs == (6, 7, 8) and sum(node.target is torch.cat for node in graph.nodes) == 1
