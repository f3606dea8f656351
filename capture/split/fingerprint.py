"""A hash of what a piece computes: equal pieces of different layers have equal fingerprints, whatever their node names."""

from __future__ import annotations

import hashlib
import operator
import sys
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from paged_attn.attn_ops.ops.kinds import KINDS
from paged_attn.capture.split.symbolic_sizes import Sizes

_PLAIN = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis),
)  # fmt: skip
_TORCH_MODULES = ("torch", "_operator", "operator", "builtins", "math")
_OURS = frozenset(kind.op for kind in KINDS if kind.on_disk)
_TORCH_OPS = ("aten", "prim", "prims", "_c10d_functional")


class Indescribable(Exception):
    """A piece holds something that no text describes completely."""


def fingerprint(piece: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    """A hash of the nodes (op, target, arguments; other nodes by position) and of the fake inputs; None if the piece cannot be compared.

    Args:
        inputs: fake tensors, symbolic sizes and Python numbers, in the order of the placeholders. Tensors are described by dtype, device,
            sizes, strides and offset as expressions of the symbols, and by which of them share memory; symbols by order and range.
    """
    try:
        lines = [*_inputs(inputs), *_nodes(piece.graph)]
    except Indescribable:
        return None
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def portable(piece: fx.GraphModule) -> bool:
    """Whether the piece calls only torch and our own ops, which the key covers; user code may change between processes."""
    return all(_is_known(node.target) for node in piece.graph.nodes if node.op == "call_function")


def _is_known(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return target in _OURS or target.namespace in _TORCH_OPS
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0] in _TORCH_OPS
    return str(getattr(target, "__module__", None)).partition(".")[0] in _TORCH_MODULES


def _inputs(inputs: Sequence[Any]) -> list[str]:
    sizes = Sizes(inputs)
    if not sizes.known:
        raise Indescribable
    storages: dict[int, int] = {}
    lines = [f"symbol {index} {bounds}" for index, bounds in enumerate(sizes.ranges())]
    for value in inputs:
        if isinstance(value, Tensor):
            lines.append(_tensor(value, sizes, storages))
        elif isinstance(value, SymInt | SymFloat | SymBool):
            lines.append(f"{type(value).__name__} {sizes.text(value)}")
        else:
            lines.append(_argument(value, {}))
    return lines


def _tensor(value: Tensor, sizes: Sizes, storages: dict[int, int]) -> str:
    if type(value) is not torch._subclasses.FakeTensor or value.layout != torch.strided:
        raise Indescribable
    shared = storages.setdefault(value.untyped_storage()._cdata, len(storages))
    numbers = [" ".join(map(sizes.text, group)) for group in (value.size(), value.stride(), (value.storage_offset(),))]
    flags = f"{value.requires_grad} {value.is_conj()} {value.is_neg()}"
    return f"tensor {value.dtype} {value.device} [{'] ['.join(numbers)}] storage {shared} {flags}"


def _nodes(graph: fx.Graph) -> list[str]:
    node_numbers: dict[fx.Node, int] = {}
    lines = []
    for node in graph.nodes:
        node_numbers[node] = len(node_numbers)
        # A placeholder's target is only its name; its default value would be an argument.
        target = "" if node.op in ("placeholder", "output") else _target(node)
        lines.append(f"{node.op} {target} {_argument(node.args, node_numbers)} {_argument(node.kwargs, node_numbers)}")
    return lines


def _target(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_function":
        return _function(node.target)
    raise Indescribable  # a module, or an attribute of the piece (`split_graph` makes tensors inputs)


def _function(target: Any) -> str:
    # A higher-order operator's arguments may be indices into tables of this process.
    if isinstance(target, HigherOrderOperator):
        raise Indescribable
    if isinstance(target, OpOverload | OpOverloadPacket):
        return f"op {target}"
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not isinstance(name, str) or module is None:
        raise Indescribable
    if not _is_known(target) and _named(module, name) is not target:  # a lambda, a local function, or one that was redefined
        raise Indescribable
    return f"function {module}.{name}"


def _named(module: str, name: str) -> Any:
    try:
        return operator.attrgetter(name)(sys.modules.get(module))
    except AttributeError:
        return None


def _argument(value: Any, node_numbers: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{node_numbers[value]}"
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, tuple | list):
        kind = "list" if isinstance(value, list) else "tuple"
        return f"{kind}({', '.join(_argument(each, node_numbers) for each in value)})"
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return f"dict({', '.join(f'{key!r}: {_argument(each, node_numbers)}' for key, each in value.items())})"
    if isinstance(value, slice):
        return f"slice({', '.join(_argument(each, node_numbers) for each in (value.start, value.stop, value.step))})"
    if isinstance(value, sympy.Expr) or not callable(value):
        raise Indescribable
    return _function(value)
