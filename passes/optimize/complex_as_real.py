"""Rewrites products of complex numbers, as rotations of queries and keys are often written, in real arithmetic.

Before: view_as_real(view_as_complex(x) * polar(one, angle))
After:  stack([x0 * cos(angle) - x1 * sin(angle), x0 * sin(angle) + x1 * cos(angle)], -1)
Left alone: a graph in which anything else is done with a complex number.

Inductor generates no code for complex numbers: each operation on them is a separate launch that interrupts fusion around it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from paged_attn.passes.fx.graph_tools import call_of_value, call_with_value, copied_from, sizes_of, symbol, value_of
from paged_attn.passes.fx.memory import remove_dead_code, written_names

# Operations that only move numbers: applied to both parts alike.
_LAYOUT = {
    "getitem", "unsqueeze", "squeeze", "view", "reshape", "expand", "transpose", "permute", "flatten", "unflatten", "contiguous", "clone",
    "detach", "to", "select", "narrow",
}  # fmt: skip


class _Parts(NamedTuple):
    real: fx.Node
    imag: fx.Node


def complex_as_real(graph: fx.Graph) -> int:
    """Rewrites in place; returns how many complex operations were replaced: all of them, or 0 if one is unknown."""
    wanted = [node for node in graph.nodes if _is_complex(node) or _complex_inputs(node)]
    written = written_names(graph)
    if any(not _is_known(node) or (copied_from(node) or node.name) in written for node in wanted):
        return 0
    parts, call = dict[fx.Node, _Parts](), _Calls(graph)
    inputs_end = next(node for node in graph.nodes if node.op != "placeholder")
    for node in wanted:
        with graph.inserting_before(inputs_end if node.op == "placeholder" else node):
            found = _in_parts(call, node, parts)
        if isinstance(found, _Parts):
            parts[node] = found
        else:
            node.replace_all_uses_with(found)
    remove_dead_code(graph)
    return len(wanted)


def _is_known(node: fx.Node) -> bool:
    """Whether `_in_parts` can replace this node."""
    name, numbers = _name(node), [_is_complex(each) for each in node.args]
    if node.op == "placeholder":
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    if name in _LAYOUT:
        converts = name == "to" and any(isinstance(each, torch.dtype | fx.Node) for each in (*node.args[1:], *node.kwargs.values()))
        return _is_complex(node) and numbers[0] and len(_complex_inputs(node)) == 1 and not converts
    if name not in _MAKERS or node.kwargs or any(isinstance(each, complex) for each in node.args):
        return False
    return any(numbers) if name in _OF_COMPLEX else not any(numbers)


class _Calls:
    """Inserts calls. Evaluates the example value once for all calls with equal operands: with symbolic sizes it takes up to 0.1 s."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._known: dict[str, Any] = {}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        alike = repr((target, fx.map_arg(args, _described), fx.map_arg(kwargs, _described)))
        if alike in self._known:
            return call_of_value(self.graph, self._known[alike], target, *args, **kwargs)
        node = call_with_value(self.graph, target, *args, **kwargs)
        self._known[alike] = value_of(node)
        return node


def _described(node: fx.Node) -> Any:
    value = value_of(node)
    return (value.dtype, value.device, sizes_of(node), tuple(map(symbol, value.stride()))) if isinstance(value, Tensor) else node


def _in_parts(call: _Calls, node: fx.Node, parts: dict[fx.Node, _Parts]) -> _Parts | fx.Node:
    """The replacement of a node: two parts if its result is complex, else a node."""
    if node.op == "placeholder":
        return _from_pairs(call, call(torch.view_as_real, node))
    if _name(node) in _LAYOUT:
        whole, *others = node.args
        assert isinstance(whole, fx.Node)
        return _Parts(*(call(node.target, part, *others, **node.kwargs) for part in parts[whole]))
    return _MAKERS[_name(node)](call, *(parts.get(each, each) if isinstance(each, fx.Node) else each for each in node.args))


def _from_pairs(call: _Calls, pairs: Any) -> _Parts:
    return _Parts(call(torch.select, pairs, -1, 0), call(torch.select, pairs, -1, 1))


def _product(call: _Calls, one: Any, other: Any) -> _Parts:
    if isinstance(one, _Parts) and isinstance(other, _Parts):
        (a, b), (c, d) = one, other
        real = call(operator.sub, call(operator.mul, a, c), call(operator.mul, b, d))
        return _Parts(real, call(operator.add, call(operator.mul, a, d), call(operator.mul, b, c)))
    whole, factor = (one, other) if isinstance(one, _Parts) else (other, one)
    return _Parts(*(call(operator.mul, part, factor) for part in whole))


_MAKERS: dict[str, Callable[..., _Parts | fx.Node]] = {
    "view_as_complex": _from_pairs,
    "complex": lambda call, real, imag: _Parts(real, imag),
    "polar": lambda call, length, angle: _Parts(*(call(operator.mul, length, call(each, angle)) for each in (torch.cos, torch.sin))),
    "mul": _product,
    "conj": lambda call, whole: _Parts(whole.real, call(operator.neg, whole.imag)),
    "view_as_real": lambda call, whole: call(torch.stack, list(whole), -1),
}
_OF_COMPLEX = {"mul", "conj", "view_as_real"}  # take complex numbers; the others make them from real ones


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _complex_inputs(node: fx.Node) -> list[fx.Node]:
    return [each for each in node.all_input_nodes if _is_complex(each)]


def _is_complex(node: Any) -> bool:
    value = value_of(node) if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.is_complex()
