"""Converts an FX graph to plain data that JSON can hold, and back; functions and ops are named as in the tables of `allowed_calls`."""

from __future__ import annotations

import base64
import keyword
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx._lazy_graph_module import _LazyGraphModule

from paged_attn.attn_ops.ops.define import overloads_of
from paged_attn.attn_ops.ops.kinds import KINDS
from paged_attn.graph_cache.allowed_calls import ATTRIBUTES, FUNCTIONS, METHODS, MODULES, OP_TEXTS, OP_TYPES, OPS_REFUSED
from paged_attn.hashing.stable_hasher import Indescribable, tensor_bytes
from paged_attn.passes.fx.graph_tools import TRACED_DTYPE, dtype_of
from paged_attn.shown import shown

MOST_BUFFER_BYTES = 16 << 20  # for tables that passes created (biases); weights are inputs of a graph
_OURS = frozenset(kind.op for kind in KINDS if kind.on_disk)
# Torch 2.11 traces comparisons of two tensors as these methods, later ones as functions. As those they are written down.
_COMPARISONS = {f"__{each.__name__}__": each for each in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)}
_KINDS = ("placeholder", "call_function", "call_method", "get_attr", "output")
_NAMED: dict[type, Callable[[str], Any]] = {  # values that can be written as text and read back by torch
    torch.dtype: lambda name: _of_torch(name, torch.dtype),
    torch.layout: lambda name: _of_torch(name, torch.layout),
    torch.memory_format: lambda name: _of_torch(name, torch.memory_format),
    torch.device: torch.device,
    complex: complex,
    type(Ellipsis): lambda name: ...,
}
Data = Any  # None, bool, int, float, str, and lists and dicts of data


def graph_data(gm: fx.GraphModule) -> Data:
    """Raises Indescribable for a graph that calls anything that is not in the tables, or holds large tensors."""
    numbers: dict[fx.Node, int] = {}
    nodes = []
    for node in gm.graph.nodes:
        op, called = node.op, node.target
        if op == "call_method" and called in _COMPARISONS:
            op, called = "call_function", _COMPARISONS[called]
        target = _function_data(called) if op == "call_function" else str(called)
        data = [op, node.name, target, _data(node.args, numbers), _data(node.kwargs, numbers), _dtype_data(node)]
        try:
            _check_node(op, called, node.args, node.kwargs)
        except ValueError as error:
            raise Indescribable(f"a graph with {error}") from None
        nodes.append(data)
        numbers[node] = len(numbers)
    names = sorted({str(node.target) for node in gm.graph.nodes if node.op == "get_attr"})
    return {"nodes": nodes, "buffers": {name: _buffer_data(gm, name) for name in names}}


def graph_of(data: Data, device: torch.device) -> fx.GraphModule:
    """Its code is written when it is first called: of both graphs of a record pieces are made, or they are run node by node.

    Raises ValueError, KeyError, TypeError, AttributeError, IndexError or RuntimeError for what `graph_data` did not write.

    Nothing of it is called or becomes Python code before it is seen to be in the tables: names and keywords of an FX graph are written out
    as code as they are.

    Args:
        device: of the tensors that the graph holds.
    """
    root = torch.nn.Module()
    for name, tensor in data["buffers"].items():
        root.register_buffer(_identifier(name), _tensor_of(tensor).to(device), persistent=False)
    graph, nodes = fx.Graph(), list[fx.Node]()
    for op, name, target, args, kwargs, dtype in data["nodes"]:
        function = _function_of(target) if op == "call_function" else _identifier(target)
        arguments, keywords = _value(args, nodes), _value(kwargs, nodes)
        _check_node(op, function, arguments, keywords)
        if op == "get_attr" and function not in data["buffers"]:
            raise ValueError(f"the attribute {shown(function)}, which is none of its tables")
        nodes.append(graph.create_node(op, function, arguments, keywords, _identifier(name)))
        if dtype is not None:
            nodes[-1].meta[TRACED_DTYPE] = _of_torch(dtype, torch.dtype)
    graph.lint()
    return _LazyGraphModule(root, graph)


def _dtype_data(node: fx.Node) -> str | None:
    """The dtype of a floating tensor as it was traced: checks that compute in wider ones give it back where an op takes no other."""
    dtype = dtype_of(node)
    return str(dtype) if dtype is not None and dtype.is_floating_point else None


def _check_node(op: str, target: Any, args: Any, kwargs: Any) -> None:
    """Raises ValueError, with what is not allowed; of functions `_function_data` and `_function_of` have asked."""
    if op not in _KINDS:
        raise ValueError(f"a node of kind {shown(op)}")
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise ValueError("arguments of another form")
    for name in kwargs:
        _identifier(name)
    if op == "call_method" and (target not in METHODS or not args or not isinstance(args[0], fx.Node)):
        raise ValueError(f"a call of the method {shown(target)}")
    if target is getattr and not (len(args) == 2 and not kwargs and isinstance(args[0], fx.Node) and args[1] in ATTRIBUTES):
        raise ValueError(f"an attribute {shown(args[1:])} that is read")
    if op in ("placeholder", "get_attr") and (args or kwargs):
        raise ValueError(f"a node of kind {op} with arguments")


def _identifier(name: object) -> str:
    """A name that can be nothing but a name in the code that FX writes."""
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name.startswith("__"):
        raise ValueError(f"the name {shown(name)}")
    return name


def _function_data(target: Any) -> list[str]:
    """An op of anybody's by name and schemas: whoever loads the graph calls the op as it is then, as the model would."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        overloads = overloads_of(target)
        schemas = [str(overload._schema) for overload in overloads]
        name = overloads[0]._schema.name.partition("::")
        data = ["op", name[0], name[2], target._overloadname if isinstance(target, OpOverload) else "", *schemas]
    elif (own := str(getattr(target, "__name__", ""))) in FUNCTIONS["torch._C"] and getattr(torch._C, own, None) is target:
        data = ["function", "torch._C", own]  # pybind11's name for its location differs between versions
    else:
        qualified = str(getattr(target, "__qualname__", "")).removeprefix("_VariableFunctionsClass.")
        data = ["function", str(getattr(target, "__module__", None)), qualified]
    try:
        known = _function_of(data)
    except (ValueError, AttributeError, ImportError):
        known = None
    if known is not target:
        raise Indescribable(f"a graph that calls {target}")
    return data


def _function_of(data: list[str]) -> Any:
    kind, *names = data
    if kind == "op":
        return _op_of(*names)
    module, name = names
    if kind != "function" or name not in FUNCTIONS.get(module, ()):
        raise ValueError(f"a call of {shown(module)} {shown(name)}, which is none of the computations that a graph from disk may call")
    return getattr(MODULES[module], name)


def _op_of(namespace: str, name: str, overload: str, *schemas: str) -> OpOverload | OpOverloadPacket:
    for each in (namespace, name, *filter(None, [overload])):
        _identifier(each)
    if namespace == "higher_order":
        raise ValueError("an op of higher order")
    packet = getattr(getattr(torch.ops, namespace), name)
    found = getattr(packet, overload) if overload else packet
    if not isinstance(found, OpOverload | OpOverloadPacket):
        raise ValueError(f"{shown(name)} of torch.ops, which is not an op")
    overloads = overloads_of(found)
    if [str(each._schema) for each in overloads] != list(schemas):
        raise ValueError(f"{found} has another schema now")
    # Besides these a packet may have others of TorchScript, for plain numbers and texts.
    dispatched = [each for each in overloads if torch._C._dispatch_has_kernel(each.name())]
    if not dispatched or not all(each in _OURS if namespace == "paged_attn" else _computes(each) for each in dispatched):
        raise ValueError(f"a call of {found}, which takes more than tensors and numbers")
    return found


def _computes(op: OpOverload) -> bool:
    """Whether, as far as its schema says, it computes tensors, or numbers of tensors, and nothing else."""
    schema: Any = op._schema
    texts = [each for each in schema.arguments if _base(each) in ("str", "Any")]
    kinds = {_base(each) for each in (*schema.arguments, *schema.returns) if each not in texts}
    return schema.name not in OPS_REFUSED and {each.name for each in texts} <= OP_TEXTS and "Tensor" in kinds and kinds <= OP_TYPES


def _base(argument: Any) -> str:
    """`Tensor` of an `Optional[List[Tensor]]`."""
    return str(argument.type).replace("Optional[", "").replace("List[", "").rstrip("]")


def _data(value: Any, numbers: Mapping[fx.Node, int]) -> Data:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, fx.Node):
        return {"node": numbers[value]}
    if type(value) in (list, fx.immutable_collections.immutable_list):
        return [_data(each, numbers) for each in value]
    if type(value) in (tuple, torch.Size):
        return {"tuple": [_data(each, numbers) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_data(key, numbers), _data(each, numbers)] for key, each in value.items()]}
    if type(value) is slice:
        return {"slice": [_data(each, numbers) for each in (value.start, value.stop, value.step)]}
    if type(value) in _NAMED:
        return {type(value).__name__: str(value)}
    if callable(value):
        return {"function": _function_data(value)}
    raise Indescribable(f"a graph that holds a {type(value).__module__}.{type(value).__qualname__}")


def _value(data: Data, nodes: list[fx.Node]) -> Any:
    if isinstance(data, list):
        return [_value(each, nodes) for each in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "node":
        return nodes[content]
    if kind == "tuple":
        return tuple(_value(each, nodes) for each in content)
    if kind == "dict":
        return {_value(key, nodes): _value(each, nodes) for key, each in content}
    if kind == "slice":
        return slice(*(_value(each, nodes) for each in content))
    if kind == "function":
        return _function_of(content)
    return {known.__name__: read for known, read in _NAMED.items()}[kind](content)


def _of_torch(name: str, kind: type) -> Any:
    name = name.removeprefix("torch.")
    value = getattr(torch, name)
    if not isinstance(value, kind):
        raise ValueError(f"{name} is no {kind.__name__}")
    return value


def _buffer_data(gm: fx.GraphModule, name: str) -> Data:
    value = operator.attrgetter(name)(gm)
    if type(value) is not Tensor or value.layout != torch.strided or "." in name:
        raise Indescribable(f"a graph that holds a {type(value).__name__} {name}")
    if value.nbytes > MOST_BUFFER_BYTES:
        raise Indescribable(f"a graph that holds {value.nbytes:,} bytes")
    return {"dtype": str(value.dtype), "shape": list(value.shape), "bytes": base64.b64encode(tensor_bytes(value)).decode()}


def _tensor_of(data: Data) -> Tensor:
    content = torch.frombuffer(bytearray(base64.b64decode(data["bytes"], validate=True)), dtype=torch.uint8)
    dtype: torch.dtype = _NAMED[torch.dtype](data["dtype"])
    return content.view(dtype).reshape(data["shape"])
