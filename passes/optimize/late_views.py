"""Makes views and copies of parts of a product where they are first used.

Before: F.linear -> reshape(split) -> op on pages or slots -> norm, gate
After:  F.linear -> op on pages or slots -> reshape(split) -> norm, gate
Some parts have a shape that makes them copies (every fourth group of columns). Made in the piece before the op, such a part is a kernel of
its own. Made in the piece that uses it, it is only an address of the kernel that reads it. The product itself is a tensor in any case.
Left alone: parts of what is computed in a piece, which its kernel can write in that shape; what is written to.
"""

from __future__ import annotations

from torch import SymInt, fx

from paged_attn.passes.fx.graph_tools import LINEARS, MOVES, name_of, value_of
from paged_attn.passes.fx.memory import is_written


def make_views_late(graph: fx.Graph) -> int:
    """Rewrites in place; returns how many nodes were moved."""
    parts = _parts_of_products(graph)
    for node in parts:
        _give_each_its_own(node)
    parts, moved = _parts_of_products(graph), 0
    for node in reversed(parts):
        first = min(node.users, default=node.next)
        if first is not node.next and not is_written({node, *node.all_input_nodes}, node, first):
            first.prepend(node)
            moved += 1
    return moved


def _parts_of_products(graph: fx.Graph) -> list[fx.Node]:
    """What is made of a linear's result alone, without computing anything, in graph order."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        sources = [each for each in node.all_input_nodes if not isinstance(value_of(each), (SymInt, int))]
        if name_of(node) in MOVES and sources and all(each in found or each.target in LINEARS for each in sources):
            found[node] = None
    return list(found)


def _give_each_its_own(node: fx.Node) -> None:
    """What unpacks a tuple gets a tuple of its own: none may be left in another piece, which could not return it."""
    if isinstance(value_of(node), (tuple, list)):
        for user in list(node.users)[1:]:
            with node.graph.inserting_before(user):
                user.replace_input_with(node, node.graph.node_copy(node))
