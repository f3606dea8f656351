"""Turns a marked trace into the graph of all layers: copies of one traced layer, with the other layers' weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from paged_attn.engine.tracing.repeated.find import AlikeLayers
from paged_attn.engine.tracing.repeated.marks import BEGIN, END, STANDS_FOR
from paged_attn.engine.tracing.repeated.same_code import Guards, NotAlike, check_same_code
from paged_attn.engine.tracing.repeated.traced_layer import Call, TracedLayer, Weights
from paged_attn.passes.fx.memory import storages_of, writers_of


def expand(
    gm: fx.GraphModule, inputs: Sequence[Any], model: nn.Module, groups: Sequence[AlikeLayers], numbers: Mapping[str, int], guards: Guards
) -> tuple[fx.GraphModule, list[Any]]:
    """The graph of all layers, from that of a trace under `marked`, and its inputs; Dynamo's own is as it was.

    Raises:
        NotAlike: layers that seemed alike are not, so that each must be traced.
    """
    gm = fx.GraphModule(gm, _copied(gm.graph))
    marks = _marks(gm.graph)
    weights, written = Weights(gm.graph, inputs, model), _written_memory(gm.graph, marks)
    for group in groups:
        first, name, *others = group.names
        pattern = TracedLayer.between(name, *(_one(marks, mark, numbers[name]) for mark in (BEGIN, END)))
        example = TracedLayer.between(first, *(_one(marks, mark, numbers[first]) for mark in (BEGIN, END)))
        for layer in (pattern, example):
            layer.forget_marks()
        check_same_code(model, guards, name, [first, *others])
        pattern.check_nothing_else_is_read_or_left(weights)
        pattern.check_is(example, weights)
        for other in others:
            mark = _one(marks, STANDS_FOR, numbers[other])
            mark.replace_all_uses_with(pattern.copy(Call.of(mark), other, weights, mark, written))
    for (target, _), nodes in marks.items():
        for node in nodes:
            if target is not STANDS_FOR:
                node.replace_all_uses_with(node.args[0] if target is END else node.args[0][0])  # type: ignore[arg-type,index]
            gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()
    return gm, weights.inputs


def _copied(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def _written_memory(graph: fx.Graph, marks: Mapping[Any, Sequence[fx.Node]]) -> set[int]:
    """What the graph writes in place of what Dynamo saw; all memory where that is what goes from layer to layer."""
    written = storages_of(writers_of(graph.nodes))
    between = storages_of(node for nodes in marks.values() for node in nodes)
    return written if written.isdisjoint(between) else storages_of(graph.nodes)


def _marks(graph: fx.Graph) -> dict[tuple[Any, Any], list[fx.Node]]:
    """The nodes of each mark and layer."""
    found: dict[tuple[Any, Any], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and (position := {BEGIN: 3, END: 1, STANDS_FOR: 3}.get(node.target)) is not None:
            found.setdefault((node.target, node.args[position]), []).append(node)
    return found


def _one(marks: Mapping[tuple[Any, Any], list[fx.Node]], target: Any, number: int) -> fx.Node:
    nodes = marks.get((target, number), [])
    if len(nodes) != 1:
        raise NotAlike(f"a layer that was called once is called {len(nodes)} times when it is traced")
    return nodes[0]
