"""Tells whether two layers read the same keys or values where each takes them by its own shape operations.

Before: layer 3: k[:, 0::2], layer 5: k[:, 0::2]       two nodes with the same numbers, as in a cross-decoder that splits its heads (SambaY)
After:  one `ReadFrom` for both: the tensor that the operations start from, and what they are
Declines: operations that compute; other spellings of the same part, and arguments that are tensors, are other parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from paged_attn.passes.fx.graph_tools import symbol, value_of
from paged_attn.passes.fx.memory import is_view, is_written
from paged_attn.passes.replace.kv_heads import KVSource, is_shape_operation


@dataclass(frozen=True)
class ReadFrom:
    """A KVSource by the tensor that its shape operations start from; the nodes that lead there are no part of what is compared."""

    source: KVSource
    steps: tuple[str, ...]

    @classmethod
    def of(cls, source: KVSource) -> tuple[ReadFrom, tuple[fx.Node, ...]]:
        """Also the nodes on the way, from the source's base to that tensor."""
        node, steps, nodes = source.base, list[str](), [source.base]
        while (step := _step(node)) is not None:
            steps.append(step)
            node = node.all_input_nodes[0]
            nodes.append(node)
        return cls(replace(source, base=node), tuple(steps)), tuple(nodes)


@dataclass(frozen=True)
class Kept:
    """Keys and values that an op stores, and the nodes by which it reads each."""

    layer_id: int
    op: fx.Node
    key: tuple[fx.Node, ...]
    value: tuple[fx.Node, ...]

    def still_holds(self, nodes: tuple[fx.Node, ...], user: fx.Node) -> bool:
        """Whether `user`, which reads them by `nodes`, gets what is stored: a step of one's own may be a copy of what was written since."""
        own = {*self.key, *self.value}
        return not is_written(own | {*nodes}, min(own - {*nodes} | {self.op}), user)


def _step(node: fx.Node) -> str | None:
    """What a node does to its first input, if that is to move or to repeat it."""
    first = node.args[0] if node.args else None
    others: list[Any] = []
    if not isinstance(first, fx.Node) or not (is_shape_operation(node) or is_view(node)):
        return None

    def told(other: fx.Node) -> Any:
        others.append(value_of(other))
        return symbol(others[-1])

    arguments = fx.map_arg((node.args[1:], dict(node.kwargs)), told)
    return None if any(isinstance(other, Tensor) for other in others) else f"{node.op} {node.target} {arguments}"
