"""Which values of a graph hold data of the tokens, a row of floating numbers for each, while its attentions are being replaced."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import as_traced, value_of
from paged_attn.passes.fx.token_data import token_axis, token_data


class TokenRows:
    """Make it before the first attention is replaced: all nodes that come later stand for results of attention.

    Args:
        values: the real tensor (or number) behind each placeholder.
    """

    def __init__(self, graph: fx.Graph, form: CallForm, values: dict[fx.Node, Any]) -> None:
        self.graph, self.form, self.values = graph, form, values
        self.known = set(graph.nodes)
        self.data = token_data(graph, form, positions=False)

    def holds_data(self, node: fx.Node) -> bool:
        """Whether it is made from token ids, positions aside."""
        return node in self.data or node not in self.known

    def is_row(self, node: fx.Node) -> bool:
        """A floating tensor with one dim of T and no other that depends on it."""
        return token_axis(node, self.form) is not None and bool(value_of(node).is_floating_point())


def bytes_of(node: fx.Node) -> int:
    """Of a tensor in the traced call: good for comparing."""
    value = value_of(node)
    return int(value.element_size()) * math.prod(int(as_traced(size)) for size in value.shape)
