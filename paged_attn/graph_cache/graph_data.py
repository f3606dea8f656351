"""An FX graph as plain data, and back: what JSON can hold, with functions by the names under which torch offers them."""

from __future__ import annotations

import base64
import importlib
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket

from paged_attn.attn_ops.linear_op import LINEAR
from paged_attn.attn_ops.op import UNIFIED_ATTENTION
from paged_attn.attn_ops.positions_op import BATCH_POSITIONS
from paged_attn.attn_ops.rope_op import ROPE_AND_STORE_KV
from paged_attn.capture.split_ops import overloads_of
from paged_attn.graph_cache.describe import Indescribable, tensor_bytes

MOST_BUFFER_BYTES = 16 << 20  # of tables that passes made (biases); weights are inputs of a graph
_OURS = (UNIFIED_ATTENTION, BATCH_POSITIONS, ROPE_AND_STORE_KV, LINEAR)  # others go by numbers of this process
_ROOTS = ("torch", "_operator", "math", "builtins")
_BUILTINS = ("getattr", "max", "min", "abs", "round", "pow", "int", "float", "bool", "len", "sum", "tuple", "slice")
_NAMED: dict[type, Callable[[str], Any]] = {  # values that torch writes as it reads them
    torch.dtype: lambda name: _attribute(torch, name.removeprefix("torch."), torch.dtype),
    torch.layout: lambda name: _attribute(torch, name.removeprefix("torch."), torch.layout),
    torch.memory_format: lambda name: _attribute(torch, name.removeprefix("torch."), torch.memory_format),
    torch.device: lambda name: torch.device(name),
    complex: lambda name: complex(name),
    type(Ellipsis): lambda name: ...,
}
Data = Any  # None, bool, int, float, str, and lists and dicts of data


def graph_data(gm: fx.GraphModule) -> Data:
    """Raises Indescribable for a graph that calls anything but torch and our own ops, or holds large tensors."""
    places: dict[fx.Node, int] = {}
    nodes = []
    for node in gm.graph.nodes:
        target = _function_data(node.target) if node.op == "call_function" else str(node.target)
        nodes.append([node.op, node.name, target, _data(node.args, places), _data(node.kwargs, places)])
        places[node] = len(places)
    names = sorted({str(node.target) for node in gm.graph.nodes if node.op == "get_attr"})
    if any(node.op == "call_module" for node in gm.graph.nodes):
        raise Indescribable("a graph that calls a module")
    return {"nodes": nodes, "buffers": {name: _tensor_data(_held(gm, name)) for name in names}}


def graph_of(data: Data, device: torch.device) -> fx.GraphModule:
    """Raises ValueError, KeyError, TypeError, AttributeError or IndexError for what `graph_data` did not write.

    Args:
        device: of the tensors that the graph holds.
    """
    root = torch.nn.Module()
    for name, tensor in data["buffers"].items():
        root.register_buffer(name, _tensor_of(tensor).to(device), persistent=False)
    graph, nodes = fx.Graph(), list[fx.Node]()
    for op, name, target, args, kwargs in data["nodes"]:
        if op not in ("placeholder", "call_function", "call_method", "get_attr", "output"):
            raise ValueError(f"a node of kind {op!r}")
        function = _function_of(target) if op == "call_function" else target
        nodes.append(graph.create_node(op, function, _value(args, nodes), _value(kwargs, nodes), name))
    graph.lint()
    return fx.GraphModule(root, graph)


def _function_data(target: Any) -> list[str]:
    """An op of anybody's by name and schemas: whoever loads the graph calls the op as it is then, as the model would."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        overloads = overloads_of(target)
        schemas = [str(overload._schema) for overload in overloads]
        name = overloads[0]._schema.name.partition("::")
        overload = target._overloadname if isinstance(target, OpOverload) else ""
        known = name[0] != "paged_attn" or target in _OURS
        data = ["op", name[0], name[2], overload, *schemas]
    else:
        module, qualified = getattr(target, "__module__", None) or "", getattr(target, "__qualname__", "")
        known = module.partition(".")[0] in _ROOTS and isinstance(qualified, str)
        data = ["function", module, str(qualified).removeprefix("_VariableFunctionsClass.")]
    if not known or _function_or_none(data) is not target:
        raise Indescribable(f"a graph that calls {target}")
    return data


def _function_or_none(data: list[str]) -> Any:
    try:
        return _function_of(data)
    except (ValueError, AttributeError, ImportError):
        return None


def _function_of(data: list[str]) -> Any:
    kind, *names = data
    if kind == "op":
        namespace, name, overload, *schemas = names
        packet = getattr(getattr(torch.ops, namespace), name)
        found = getattr(packet, overload) if overload else packet
        if [str(each._schema) for each in overloads_of(found)] != schemas:
            raise ValueError(f"{found} has another schema now")
        return found
    module, name = names
    if module.partition(".")[0] not in _ROOTS or (module == "builtins" and name not in _BUILTINS):
        raise ValueError(f"{module}.{name} is no function of torch")
    return operator.attrgetter(name)(importlib.import_module(module))


def _data(value: Any, places: Mapping[fx.Node, int]) -> Data:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, fx.Node):
        return {"node": places[value]}
    if type(value) in (list, fx.immutable_collections.immutable_list):
        return [_data(each, places) for each in value]
    if type(value) in (tuple, torch.Size):
        return {"tuple": [_data(each, places) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_data(key, places), _data(each, places)] for key, each in value.items()]}
    if type(value) is slice:
        return {"slice": [_data(each, places) for each in (value.start, value.stop, value.step)]}
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
    return next(read for known, read in _NAMED.items() if known.__name__ == kind)(content)


def _attribute(module: Any, name: str, kind: type) -> Any:
    value = getattr(module, name)
    if not isinstance(value, kind):
        raise ValueError(f"{name} is no {kind.__name__}")
    return value


def _held(gm: fx.GraphModule, name: str) -> Tensor:
    value = operator.attrgetter(name)(gm)
    if type(value) is not Tensor or value.layout != torch.strided or "." in name:
        raise Indescribable(f"a graph that holds a {type(value).__name__} {name}")
    if value.nbytes > MOST_BUFFER_BYTES:
        raise Indescribable(f"a graph that holds {value.nbytes:,} bytes")
    return value


def _tensor_data(value: Tensor) -> Data:
    return {"dtype": str(value.dtype), "shape": list(value.shape), "bytes": base64.b64encode(tensor_bytes(value)).decode()}


def _tensor_of(data: Data) -> Tensor:
    content = torch.frombuffer(bytearray(base64.b64decode(data["bytes"], validate=True)), dtype=torch.uint8)
    dtype: torch.dtype = _NAMED[torch.dtype](data["dtype"])
    return content.view(dtype).reshape(data["shape"])
