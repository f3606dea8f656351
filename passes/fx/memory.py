"""Which values a node writes in place, and which values show the same memory."""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.ops.define import overloads_of
from paged_attn.passes.fx.graph_tools import argument_of, copied_from, name_of, reached, value_of

_INPLACE_FUNCTIONS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.iand, operator.ior, operator.ixor, operator.ipow, operator.imatmul,
}  # fmt: skip
_SIDE_EFFECTS = {"manual_seed", "_assert", "_assert_async", "_set_grad_enabled"}
_VIEWS = {
    "view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "flatten", "unflatten", "select", "narrow", "slice",
    "chunk", "split", "unbind", "t", "contiguous", "to", "float", "detach", "diagonal", "swapaxes", "movedim", "view_as", "expand_as",
    "unfold", "split_with_sizes", "type", "type_as", "half", "bfloat16", "double", "tensor_split", "as_strided", "broadcast_to", "alias",
    "ravel", "swapdims", "moveaxis", "reshape_as", "hsplit", "vsplit", "dsplit", "unsafe_split", "unsafe_chunk", "view_as_real",
    "view_as_complex", "real", "imag", "adjoint", "positive", "bool", "int", "long", "cpu", "cuda", "conj", "resolve_conj", "resolve_neg",
    "atleast_1d", "atleast_2d", "atleast_3d", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
    "feature_alpha_dropout",
}  # fmt: skip


def writes_in_place(node: fx.Node) -> bool:
    """True for in-place methods and functions, `inplace=True`, and ops whose schema mutates an argument."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    target = node.target
    if (always := _always_writes(target)) is not None:
        return always
    return node.kwargs.get("out") is not None or _has_inplace_flag(node)


@lru_cache(1024)  # a trace may have functions of its own
def _always_writes(target: Any) -> bool | None:
    """None for a function that writes in place only if it is asked to."""
    if overloads := overloads_of(target):
        return any(overload._schema.is_mutable for overload in overloads)
    name = getattr(target, "__name__", "")
    named = name.endswith("_") and not name.endswith("__") and getattr(target, "__module__", "") != "_operator"
    return True if named or target in _INPLACE_FUNCTIONS else None


def _has_inplace_flag(node: fx.Node) -> bool:
    """Whether it is called with `inplace=True`, which activations of torch.nn.functional accept."""
    flag_index = _index_of_inplace(node.target)
    return flag_index is not None and bool(argument_of(node, flag_index, "inplace"))


@cache
def _index_of_inplace(function: Any) -> int | None:
    if not isinstance(function, types.FunctionType):  # builtins have no such argument
        return None
    names = list(inspect.signature(function).parameters)
    return names.index("inplace") if "inplace" in names else None


def remove_dead_code(graph: fx.Graph) -> None:
    """Dead-code elimination that keeps in-place operations on live values, also through views.

    `graph.eliminate_dead_code()` drops unused in-place methods, which silently changed logits (docs/design/passes.md). In-place
    operations on dead values are removed too, so nothing of a replaced attention's mask remains.
    """
    writers = writers_of(graph.nodes)
    kept = [n for n in graph.nodes if n.op in ("output", "placeholder") or (n.op == "call_function" and name_of(n) in _SIDE_EFFECTS)]
    live = set(reached(kept, lambda node: (*node.all_input_nodes, *writers.get(node, ()))))
    for node in reversed(list(graph.nodes)):
        if node not in live:
            graph.erase_node(node)


def written_values(node: fx.Node) -> set[fx.Node]:
    """The values that an in-place node changes: its targets, and the bases of those that are views; empty for any other node."""
    if not writes_in_place(node):
        return set()
    if overloads := overloads_of(node.target):
        arguments = ((i, a) for overload in overloads for i, a in enumerate(overload._schema.arguments))
        mutable = [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]
        targets = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in mutable]
    else:
        targets = [*node.args[:1], node.kwargs.get("out"), node.kwargs.get("input") if _has_inplace_flag(node) else None]
    return bases_of(target for target in targets if isinstance(target, fx.Node))


def is_written(values: set[fx.Node], start: fx.Node, end: fx.Node) -> bool:
    """Whether an in-place operation between the nodes `start` and `end` may change one of `values`, or what one of them is a view of."""
    node, values = start, bases_of(values)
    while node is not end:
        if values & written_values(node):
            return True
        node = node.next
    return False


Writers = dict[fx.Node, list[fx.Node]]


def writers_of(nodes: Iterable[fx.Node]) -> Writers:
    """The in-place nodes among `nodes`, by the values they change."""
    writers: Writers = {}
    for node in nodes:
        for value in written_values(node):
            writers.setdefault(value, []).append(node)
    return writers


def bases_of(values: Iterable[fx.Node]) -> set[fx.Node]:
    """The values, and all values that they are views of."""

    def shown(value: fx.Node) -> list[fx.Node]:
        base, mine = value.args[0] if value.args and _may_alias(value) else None, storages_of([value])
        return [node for node in value.all_input_nodes if node is base or not mine.isdisjoint(storages_of([node]))]

    return set(reached(values, shown))


def storages_of(nodes: Iterable[fx.Node]) -> set[int]:
    """The storages of the nodes' traced tensors."""
    values = [value if isinstance(value, (tuple, list)) else (value,) for value in map(value_of, nodes)]
    return {_unwrapped(tensor).untyped_storage()._cdata for tensors in values for tensor in tensors if isinstance(tensor, Tensor)}


def _unwrapped(tensor: Tensor) -> Tensor:
    """Without the batch dims of vmap, which have no storage of their own."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_view(node: fx.Node) -> bool:
    """Judged by its name: whether a node returns its first argument or a part of it, without computing anything."""
    return _may_alias(node) and not writes_in_place(node)


def behind_views(node: Any) -> Any:
    """Follows views back to the value they show; the node itself if it is no view."""
    while isinstance(node, fx.Node) and is_view(node) and node.args:
        node = node.args[0]
    return node


def _may_alias(node: fx.Node) -> bool:
    """Judged by its name: whether a result may share memory with the first argument, as for views and in-place operations."""
    named = name_of(node) in _VIEWS or node.target in (operator.getitem, getattr)
    return node.op in ("call_function", "call_method") and (named or writes_in_place(node))


def written_names(graph: fx.Graph) -> set[str]:
    """The names of nodes that are written in place; in a copy, the original's names."""
    return {copied_from(node) or node.name for node in writers_of(graph.nodes)}


def same_values(original: fx.Graph, rewritten: fx.Graph) -> dict[str, str]:
    """Maps names in a rewritten copy to names in the original, for nodes that compute the same. Leaves out nodes that are written in
    place, whose values depend on when they are read."""
    written = written_names(original) | written_names(rewritten)
    return {node.name: before for node in rewritten.nodes if (before := copied_from(node)) is not None and before not in written}


def move_before(anchor: fx.Node, wanted: Iterable[fx.Node]) -> bool:
    """Moves `wanted`, and everything they depend on, in front of `anchor`. Returns False and moves nothing if they depend on `anchor`, or
    if this would move an in-place operation."""
    late = sorted(reached((node for node in wanted if node >= anchor), lambda node: (n for n in node.all_input_nodes if n >= anchor)))
    if anchor in late or any(writes_in_place(node) for node in late):
        return False
    for node in late:
        anchor.prepend(node)
    return True
