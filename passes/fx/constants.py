"""Numbers of the model that Dynamo made symbolic become constants again, each with a guard.

Before: s = placeholder (a module's float or int, after two models in one process differed in it); F.sdpa(..., scale=s)
After:  F.sdpa(..., scale=0.25), and a guard that recompiles if the module's number changes
Token counts stay symbolic: they belong to the call.
"""

from __future__ import annotations

from typing import Any

from torch import SymFloat, SymInt, fx

from paged_attn.passes.fx.graph_tools import of_module, source_name, value_of


def specialise_numbers(original: fx.Graph, copied: fx.Graph) -> int:
    """Rewrites `copied` in place (sources are read off `original`'s placeholders); returns the number of nodes that became constants."""
    count = 0
    sizes = [n for n in original.nodes if n.op == "placeholder" and isinstance(value_of(n), SymInt) and not of_module(source_name(n))]
    of_call = {part for size in sizes for part in value_of(size).node.expr.free_symbols}
    for old, new in zip(original.nodes, list(copied.nodes), strict=True):
        value = value_of(old)
        if isinstance(value, SymFloat) and value.node.expr.free_symbols & of_call:
            continue  # made from the number of tokens
        if isinstance(value, SymFloat):
            constant: float | int = float(value)  # converting installs the guard
        elif isinstance(value, SymInt) and old.op == "placeholder" and of_module(source_name(old)):
            constant = int(value)
        else:
            continue

        def as_number(node: fx.Node, symbolic: fx.Node = new, number: float | int = constant) -> Any:
            return number if node is symbolic else node

        for user in list(new.users):
            user.args = fx.map_arg(user.args, as_number)
            user.kwargs = fx.map_arg(user.kwargs, as_number)
        count += 1
    return count
