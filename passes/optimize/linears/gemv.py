"""Linears become `paged_attn::linear`, which has a kernel for a single row: for steps of one request.

Before: F.linear(x, weight, bias), x [..., T, K]
After:  paged_attn.linear(x, weight, bias), the same for any number of rows
Left alone: see `linears.linear_of`; and linears whose input has the same size in every step.
"""

from __future__ import annotations

from torch import SymInt, fx

from paged_attn.attn_ops.ops.linears.linear import LINEAR
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import shape_of
from paged_attn.passes.optimize.linears.sites import linear_of


def use_gemv(graph: fx.Graph, form: CallForm) -> int:
    """Rewrites in place; returns how many linears became the op."""
    found = [linear for node in graph.nodes if (linear := linear_of(node, form)) is not None]
    found = [linear for linear in found if any(isinstance(size, SymInt) for size in shape_of(linear.input))]
    for linear in found:
        linear.node.target, linear.node.kwargs = LINEAR, {}
        linear.node.args = (linear.input, linear.weight, linear.bias)
    return len(found)
