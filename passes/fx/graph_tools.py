"""Small tools for FX graphs, shared by several passes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import SymFloat, SymInt, Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx._lazy_graph_module import _LazyGraphModule

_COPY_OF = "copy_of"
TRACED_DTYPE = "traced_dtype"  # key in a node's meta, for graphs from disk
_OF_MODULE = re.compile(r"L\['(self|model)'\]|L\['args'\]\[0\]\.(?!(size|stride|storage_offset)\()")
MOVES = {
    "view", "reshape", "flatten", "unflatten", "transpose", "permute", "swapaxes", "movedim", "squeeze", "unsqueeze", "split",
    "split_with_sizes", "chunk", "unbind", "narrow", "select", "slice", "contiguous", "clone", "getitem",
}  # fmt: skip
JOINS = {"cat", "concat", "concatenate"}
LINEARS = (F.linear, torch.ops.aten.linear.default)


def reached(start: Iterable[fx.Node], onwards: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """`start` and all nodes to which `onwards` leads from there, each once, the nearest first."""
    found = list(dict.fromkeys(start))
    seen = set(found)
    for node in found:  # grows meanwhile
        yield node
        for other in onwards(node):
            if other not in seen:
                seen.add(other)
                found.append(other)


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


def embedding_of(node: fx.Node) -> tuple[Any, Any] | None:
    """The index and the table of a call of F.embedding, passed by position or by name; None for any other node."""
    if node.op != "call_function" or node.target is not F.embedding:
        return None
    return argument_of(node, 0, "input"), argument_of(node, 1, "weight")


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


def take_place(old: fx.Node, new: fx.Node, *made: fx.Node) -> None:
    """`new` is read wherever `old` was, which is erased; it and all that was `made` for it belong to the module that `old` was in."""
    for node in (new, *made) if "nn_module_stack" in old.meta else ():
        node.meta["nn_module_stack"] = old.meta["nn_module_stack"]
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


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
