"""A piece as a function of all its tensors: those that it holds itself become inputs behind the others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx


@dataclass(frozen=True)
class Lifted:
    """`gm` takes the piece's inputs and then `held`, and returns a tuple; `single` says that the piece returned its only element."""

    gm: fx.GraphModule
    held: tuple[Tensor, ...]
    single: bool


def lifted(piece: fx.GraphModule) -> Lifted:
    """The same computation; the piece stays as it was."""
    graph, nodes = fx.Graph(), {}
    for node in piece.graph.find_nodes(op="placeholder"):
        nodes[node] = graph.node_copy(node)
    held: dict[str, fx.Node] = {}
    tensors: list[Tensor] = []
    for node in piece.graph.find_nodes(op="get_attr"):
        value = fx.graph_module._get_attr(piece, node.target)
        if isinstance(value, Tensor):
            if node.target not in held:
                held[node.target] = graph.placeholder(f"held_{len(tensors)}")
                tensors.append(value.detach())
            nodes[node] = held[node.target]
    for node in piece.graph.nodes:
        if node.op != "output" and node not in nodes:
            nodes[node] = graph.node_copy(node, lambda other: nodes[other])
    output = piece.graph.output_node().args[0]
    values = tuple(output) if isinstance(output, tuple | list) else (output,)
    graph.output(fx.map_arg(values, lambda other: nodes[other]))
    return Lifted(fx.GraphModule(piece, graph), tuple(tensors), not isinstance(output, tuple | list))
