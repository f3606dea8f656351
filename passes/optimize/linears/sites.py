"""Linear layers in a graph: F.linear on a weight, and maybe a bias, that the model owns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, fx

from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import LINEARS, arguments_of, value_of


class Linear(NamedTuple):
    node: fx.Node
    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    @property
    def owned(self) -> tuple[fx.Node, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def linear_of(node: fx.Node, form: CallForm) -> Linear | None:
    """None for other nodes, for weights that are computed in the graph or are not two-dimensional, and for mixed dtypes (autocast)."""
    if node.op != "call_function" or node.target not in LINEARS:
        return None
    given = arguments_of(node, ("input", "weight", "bias"))
    linear = Linear(node, given["input"], given["weight"], given.get("bias"))
    if any(not isinstance(owned, fx.Node) or form.roles.get(owned) != "owned" for owned in linear.owned):
        return None
    values = [value_of(each) for each in (*linear.owned, linear.input, node)]
    if not all(isinstance(value, Tensor) for value in values) or values[0].dim() != 2:
        return None
    return linear if len({value.dtype for value in values}) == 1 else None
