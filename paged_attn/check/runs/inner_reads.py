"""Which reads of a boundary lie in the piece that computes it: these go on with the value as it was computed, and what is forced there
begins at the next piece, as in what is served."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from paged_attn.passes.fx.graph_tools import written_names


def inner_reads(graph: fx.Graph, stages: Mapping[str, int]) -> dict[str, frozenset[str]]:
    """Of the graph that was traced.

    Args:
        stages: by boundary, the place of the piece that computes it, or of the op between pieces.

    Returns:
        By boundary, the nodes that read it and are of the same piece: those that lead to one of its boundaries, and past no other.
        A value that something writes to has none, since two copies of it would be two.
    """
    stage: dict[fx.Node, int] = {}
    last = max(stages.values(), default=0)
    for node in reversed(graph.nodes):
        stage[node] = stages.get(node.name, min((stage[user] for user in node.users), default=last))
    written = written_names(graph)
    return {
        node.name: inner
        for node in graph.nodes
        if node.name in stages and node.name not in written
        and (inner := frozenset(user.name for user in node.users if stage[user] == stage[node]))
    }  # fmt: skip
