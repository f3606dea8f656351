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
    """As activations of torch.nn.functional have it: `relu(x, inplace=True)`."""
    flag_index = _index_of_inplace(node.target)
    return flag_index is not None and bool(argument_of(node, flag_index, "inplace"))


@cache
def _index_of_inplace(function: Any) -> int | None:
    if not isinstance(function, types.FunctionType):  # builtins have no such argument
        return None
    names = list(inspect.signature(function).parameters)
    return names.index("inplace") if "inplace" in names else None


def remove_dead_code(graph: fx.Graph) -> None:
    """Dead-code elimination that keeps every in-place operation on something that lives, also through views.

    `graph.eliminate_dead_code()` alone drops unused in-place methods, which silently changed logits (docs/design/passes.md). An
    in-place operation on something dead goes too, so that the mask of a replaced attention leaves no residue.
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
    """The values that an in-place node changes: its targets, and whatever those are views of; nothing for any other node."""
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
    """Whether an in-place operation between the nodes `start` and `end` changes one of `values`."""
    node = start
    while node is not end:
        if values & written_values(node):
            return True
        node = node.next
    return False


Writers = dict[fx.Node, list[fx.Node]]


def writers_of(nodes: Iterable[fx.Node]) -> Writers:
    """For each value that one of the nodes changes in place, what changes it."""
    writers: Writers = {}
    for node in nodes:
        for value in written_values(node):
            writers.setdefault(value, []).append(node)
    return writers


def bases_of(values: Iterable[fx.Node]) -> set[fx.Node]:
    """The values, and whatever those are views of."""
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
    """Whether any of what Dynamo saw there lay in the same memory; False where it says nothing."""
    return not storages_of([one]).isdisjoint(storages_of([other]))


def storages_of(nodes: Iterable[fx.Node]) -> set[int]:
    """The memory in which lay what Dynamo saw there."""
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
    """One of them, which may be given by its place or by its name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def is_view(node: fx.Node) -> bool:
    """Whether a node computes nothing, by its name: it is another view of its first argument, or a part of it."""
    return _may_alias(node) and not writes_in_place(node)


def behind_views(node: Any) -> Any:
    """The value that a node is a view of, whatever views lie between; itself if it is none."""
    while isinstance(node, fx.Node) and is_view(node) and node.args:
        node = node.args[0]
    return node


def _may_alias(node: fx.Node) -> bool:
    """Whether a node's result may share memory with its first argument, by its name: views, and in-place operations, which return it."""
    named = name_of(node) in _VIEWS or node.target in (operator.getitem, getattr)
    return node.op in ("call_function", "call_method") and (named or writes_in_place(node))


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A GraphModule with its own graph and the same parameters, so that the original stays runnable. Code is written when the
    copy is called: most are only split, or run node by node."""
    copied = _LazyGraphModule(gm, copy.deepcopy(gm.graph))
    for old, new in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        new.meta[_COPY_OF] = old.name
    return copied


def copied_from(node: fx.Node) -> str | None:
    """The name that a node had in the graph that was copied; None for one that a pass made."""
    return node.meta.get(_COPY_OF)


def written_names(graph: fx.Graph) -> set[str]:
    """The names of nodes that something in the graph writes to, there or in the graph that it is a copy of."""
    return {str(node.meta.get(_COPY_OF, node.name)) for node in writers_of(graph.nodes)}


def same_values(original: fx.Graph, rewritten: fx.Graph) -> dict[str, str]:
    """Nodes of a rewritten copy that compute what they computed in the original, each by its name in both. None of those that something
    writes to: what they hold depends on when one looks."""
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
    """Whether a source lies in the module whose forward is traced; below a decorator of its forward, that is `args[0]`."""
    return _OF_MODULE.match(source) is not None


def value_of(node: Any) -> Any:
    """What Dynamo saw at this node: a fake tensor, a SymInt, or the constant itself."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else node


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of a node's tensor, as traced; also in a graph from disk, which has no fake tensors. None for anything else."""
    value = value_of(node)
    return value.dtype if isinstance(value, Tensor) else node.meta.get(TRACED_DTYPE)


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    return tuple(value_of(node).shape)


def sizes_of(node: Any) -> tuple[Any, ...]:
    """The shape of a node's tensor in ints and `symbol`s; () for anything else."""
    value = value_of(node)
    return tuple(symbol(size) for size in value.shape) if isinstance(value, Tensor) else ()


def symbol(size: Any) -> Any:
    """The sympy expression of a symbolic size, or the int itself; comparing these installs no guard."""
    expression = size.node.expr if isinstance(size, SymInt) else size
    return int(expression) if getattr(expression, "is_Integer", False) else expression


def token_dims(node: Any, token_symbol: Any) -> int:
    """How many dims of a node's tensor depend on the number of tokens; 0 for anything else."""
    value = value_of(node)
    return sum(depends_on(size, token_symbol) for size in value.shape) if isinstance(value, torch.Tensor) else 0


def size_at(size: Any, tokens: Any, length: int) -> int:
    """A size of the traced call in one of `length` tokens."""
    return int(symbol(size).subs(tokens, length)) if depends_on(size, tokens) else int(size)


def shape_at(node: Any, tokens: Any, length: int) -> list[int]:
    """The shape of a node's tensor, or of a traced tensor, in a call of `length` tokens."""
    return [size_at(size, tokens, length) for size in value_of(node).shape]


def call(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any = None) -> Any:
    """What a function's or method's node does, or would do with another target."""
    target = node.target if target is None else target
    return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)


def call_with_value(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call of a function (or, by name, of a method) with its example value, and the module of its first input."""
    values, keywords = fx.map_arg(args, value_of), fx.map_arg(kwargs, value_of)
    function = getattr(values[0], target) if isinstance(target, str) else target
    with enable_python_dispatcher():  # composite operations on symbolic sizes need it (torch 2.11)
        value = function(*(values[1:] if isinstance(target, str) else values), **keywords)
    return call_of_value(graph, value, target, *args, **kwargs)


def call_of_value(graph: fx.Graph, value: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """The same where the example value is known."""
    node = graph.call_method(target, args, kwargs) if isinstance(target, str) else graph.call_function(target, args, kwargs)
    node.meta["example_value"] = value
    source = next((a for a in args if isinstance(a, fx.Node)), None)
    if source is not None and "nn_module_stack" in source.meta:
        node.meta["nn_module_stack"] = source.meta["nn_module_stack"]
    return node


def move_before(anchor: fx.Node, wanted: Iterable[fx.Node]) -> bool:
    """Move `wanted`, and what they are made from, in front of `anchor` where they come after it; False, and nothing moved, if they are made
    from `anchor` or something is written in place on the way."""
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
    """A symbolic number as it was in the traced call, anything else as it is; reading it so installs no guard."""
    return value.node.hint if isinstance(value, (SymInt, SymFloat)) else value


def depends_on(size: Any, token_symbol: Any) -> bool:
    expression = symbol(size)
    return not isinstance(expression, int) and token_symbol in getattr(expression, "free_symbols", ())


def add_buffer(graph: fx.Graph, name: str, value: Tensor) -> fx.Node:
    """A node at the graph's insertion point whose value is this tensor, which the graph's module keeps under that name."""
    assert graph.owning_module is not None
    graph.owning_module.register_buffer(name, value, persistent=False)
    return graph.get_attr(name)
