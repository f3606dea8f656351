"""One attention found in a graph, before it is rewritten; what every finder returns."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class AttentionSite:
    """softmax(scale * query @ key^T + mask) @ value, as the graph spells it.

    Attributes:
        node: produces the attention output [1, q_heads, T, v_dim]; replaced by the rewrite.
        query, key, value: [1, heads, T, dim] nodes; key and value may still be repeated over heads.
        mask: boolean or additive mask node, or None.
        is_causal: the call's own causal flag.
        scale: multiplies q.k.
        found_by: the finder's words for `explain`.
    """

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None
    is_causal: bool
    scale: float
    found_by: str

    @property
    def module(self) -> str:
        return module_path(self.node)


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module that made a node: `model.layers.3.self_attn`, or "" outside any."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(list(stack.values()))), "")
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    path = re.sub(r"^_modules\['([^']+)'\]", r"\1", path)
    return re.sub(r"\[(\d+)\]", r".\1", path).strip(".")
