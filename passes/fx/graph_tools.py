"""Small tools for FX graphs, shared by several passes."""

from __future__ import annotations

import copy
import inspect
import operator
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import SymFloat, SymInt, Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx._lazy_graph_module import _LazyGraphModule

from paged_attn.attn_ops.ops.define import overloads_of

_INPLACE_FUNCTIONS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.iand, operator.ior, operator.ixor, operator.ipow, operator.imatmul,
}  # fmt: skip
_COPY_OF = "copy_of"
TRACED_DTYPE = "traced_dtype"  # key in a node's meta, for graphs from disk
_OF_MODULE = re.compile(r"L\['(self|model)'\]|L\['args'\]\[0\]\.(?!(size|stride|storage_offset)\()")
MOVES = {
    "view", "reshape", "flatten", "unflatten", "transpose", "permute", "swapaxes", "movedim", "squeeze", "unsqueeze", "split",
    "split_with_sizes", "chunk", "unbind", "narrow", "select", "slice", "contiguous", "clone", "getitem",
}  # fmt: skip
JOINS = {"cat", "concat", "concatenate"}
LINEARS = (F.linear, torch.ops.aten.linear.default)
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
    live: set[fx.Node] = {node for node in graph.nodes if node.op in ("output", "placeholder") or _has_effect(node)}
    pending = list(live)
    while pending:
        node = pending.pop()
        for other in (*node.all_input_nodes, *writers.get(node, ())):
            if other not in live:
                live.add(other)
                pending.append(other)
    for node in reversed(list(graph.nodes)):
        if node not in live:
            graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _SIDE_EFFECTS


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
    found, pending = set[fx.Node](), list(values)
    while pending:
        value = pending.pop()
        if value not in found:
            found.add(value)
            base = value.args[0] if value.args and _may_alias(value) else None
            pending += [base] if isinstance(base, fx.Node) else []
            pending += [node for node in value.all_input_nodes if _share_memory(node, value)]
    return found


def _share_memory(one: fx.Node, other: fx.Node) -> bool:
    """Whether the traced values of two nodes overlap in memory; False if a node has no traced value."""
    return not storages_of([one]).isdisjoint(storages_of([other]))


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


def name_of(node: fx.Node) -> str:
    """The name of a function, method or overload: `arange`, `new_empty`."""
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", "")).split(".")[0]


def op_name(node: fx.Node) -> str:
    """`add` for torch.add, operator.add, aten.add.Tensor, .add and .add_; "" for a node that calls nothing."""
    return name_of(node).strip("_")


def arguments_of(node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
    """A node's arguments by the names of its function's parameters."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def argument_of(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """One argument, passed by position or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


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


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A GraphModule with its own graph and the same parameters. Its code is only generated when it is called, since most copies are
    split, or run node by node."""
    copied = _LazyGraphModule(gm, copy.deepcopy(gm.graph))
    for old, new in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        new.meta[_COPY_OF] = old.name
    return copied


def copied_from(node: fx.Node) -> str | None:
    """The name of the node in the original graph; None for a node that a pass made."""
    return node.meta.get(_COPY_OF)


def keep_name(new: fx.Node, old: fx.Node) -> None:
    """`new`, of the same value, takes the place of `old` where values are compared with those of the original graph."""
    if (name := copied_from(old)) is not None:
        new.meta[_COPY_OF] = name


def written_names(graph: fx.Graph) -> set[str]:
    """The names of nodes that are written in place; in a copy, the original's names."""
    return {str(node.meta.get(_COPY_OF, node.name)) for node in writers_of(graph.nodes)}


def same_values(original: fx.Graph, rewritten: fx.Graph) -> dict[str, str]:
    """Maps names in a rewritten copy to names in the original, for nodes that compute the same. Leaves out nodes that are written in
    place, whose values depend on when they are read."""
    written = written_names(original) | written_names(rewritten)
    named = {node.name: node.meta[_COPY_OF] for node in rewritten.nodes if _COPY_OF in node.meta}
    return {name: before for name, before in named.items() if before not in written}


def source_name(placeholder: fx.Node) -> str:
    """Dynamo's name of a graph input: `L['self']._modules['lm_head']._parameters['weight']`, `L['input_ids']`."""
    source = getattr(placeholder, "_dynamo_source", None) or getattr(placeholder.meta.get("grapharg"), "source", None)
    if source is None:
        return str(placeholder.target)
    name = source.name
    return name() if callable(name) else str(name)


def of_module(source: str) -> bool:
    """Whether a source belongs to the traced module. If its forward is decorated, the module is `args[0]`."""
    return _OF_MODULE.match(source) is not None


def value_of(node: Any) -> Any:
    """The traced value of a node: a fake tensor, a SymInt, or the constant itself."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else node


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of a node's traced tensor, also in a graph from disk, which has no fake tensors; None if it is not a tensor."""
    value = value_of(node)
    return value.dtype if isinstance(value, Tensor) else node.meta.get(TRACED_DTYPE)


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    return tuple(value_of(node).shape)


def sizes_of(node: Any) -> tuple[Any, ...]:
    """The shape of a node's tensor as ints and sympy expressions; () if it is not a tensor."""
    value = value_of(node)
    return tuple(symbol(size) for size in value.shape) if isinstance(value, Tensor) else ()


def symbol(size: Any) -> Any:
    """The sympy expression of a symbolic size, or the int itself; comparing these adds no guard."""
    expression = size.node.expr if isinstance(size, SymInt) else size
    return int(expression) if getattr(expression, "is_Integer", False) else expression


def token_dims(node: Any, token_symbol: Any) -> int:
    """How many dims of a node's tensor depend on the number of tokens; 0 if it is not a tensor."""
    value = value_of(node)
    return sum(depends_on(size, token_symbol) for size in value.shape) if isinstance(value, torch.Tensor) else 0


def size_at(size: Any, tokens: Any, length: int) -> int:
    """A traced size in a call of `length` tokens."""
    return int(symbol(size).subs(tokens, length)) if depends_on(size, tokens) else int(size)


def shape_at(node: Any, tokens: Any, length: int) -> list[int]:
    """The shape of a node's tensor, or of a traced tensor, in a call of `length` tokens."""
    return [size_at(size, tokens, length) for size in value_of(node).shape]


def call(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any = None) -> Any:
    """Runs a function's or method's node on these arguments, or calls another `target` in its place."""
    target = node.target if target is None else target
    return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)


def call_with_value(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Inserts a call of a function (or, by name, of a method), with its example value and the module stack of its first input."""
    values, keywords = fx.map_arg(args, value_of), fx.map_arg(kwargs, value_of)
    function = getattr(values[0], target) if isinstance(target, str) else target
    with enable_python_dispatcher():  # needed by composite operations on symbolic sizes (torch 2.11)
        value = function(*(values[1:] if isinstance(target, str) else values), **keywords)
    return call_of_value(graph, value, target, *args, **kwargs)


def call_of_value(graph: fx.Graph, value: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """`call_with_value` for a known example value."""
    node = graph.call_method(target, args, kwargs) if isinstance(target, str) else graph.call_function(target, args, kwargs)
    node.meta["example_value"] = value
    source = next((a for a in args if isinstance(a, fx.Node)), None)
    if source is not None and "nn_module_stack" in source.meta:
        node.meta["nn_module_stack"] = source.meta["nn_module_stack"]
    return node


def move_before(anchor: fx.Node, wanted: Iterable[fx.Node]) -> bool:
    """Moves `wanted`, and everything they depend on, in front of `anchor`. Returns False and moves nothing if they depend on `anchor`, or
    if this would move an in-place operation."""
    late, pending = set[fx.Node](), list(wanted)
    while pending:
        node = pending.pop()
        if node >= anchor and node not in late:
            late.add(node)
            pending += node.all_input_nodes
    if anchor in late or any(writes_in_place(node) for node in late):
        return False
    for node in sorted(late):
        anchor.prepend(node)
    return True


def as_traced(value: Any) -> Any:
    """The traced value of a symbolic number, without adding a guard; any other value unchanged."""
    return value.node.hint if isinstance(value, (SymInt, SymFloat)) else value


def depends_on(size: Any, token_symbol: Any) -> bool:
    expression = symbol(size)
    return not isinstance(expression, int) and token_symbol in getattr(expression, "free_symbols", ())


def add_buffer(graph: fx.Graph, name: str, value: Tensor) -> fx.Node:
    """Registers a tensor as a buffer of the graph's module; returns a get_attr node for it at the graph's insertion point."""
    assert graph.owning_module is not None
    graph.owning_module.register_buffer(name, value, persistent=False)
    return graph.get_attr(name)
