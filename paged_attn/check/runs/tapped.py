"""Runs a graph node by node, reading and replacing some of its values; also in a wider dtype."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.ops.define import overloads_of
from paged_attn.passes.fx.graph_tools import dtype_of
from paged_attn.passes.fx.memory import writers_of, writes_in_place

Visit = Callable[[str, Tensor], Tensor]
_NARROW_METHODS = ("half", "bfloat16", "float")
_TORCH_NAMESPACES = ("aten", "prims", "higher_order")
_NARROW_ONLY = ("_grouped_mm", "grouped_mm", "_scaled_mm", "scaled_mm", "scaled_grouped_mm", "_scaled_grouped_mm")
_NOT_IN_WIDE = (RuntimeError, TypeError, NotImplementedError)  # raised by torch if an operation does not support these dtypes


def unchanged(_: object, value: Tensor) -> Tensor:
    """A visit that replaces nothing."""
    return value


def wider(narrow: torch.dtype) -> torch.dtype:
    """The dtype in which a model of this floating-point dtype is run to see what it would compute without rounding."""
    return torch.float32 if narrow.itemsize < 4 else torch.float64


@dataclass(frozen=True)
class Taps:
    """The values of a graph to visit.

    Attributes:
        names: of their nodes. If an op writes into an argument, that argument is the value.
        late: by node, values that are visited just before that node is computed, since they are written in place until then.
        inner: by name, the nodes that read the value as it was computed, whatever replaces it for all others.
    """

    names: Collection[str]
    late: Mapping[str, Sequence[str]] = field(default_factory=dict)
    inner: Mapping[str, Collection[str]] = field(default_factory=dict)


class TappedRun(fx.Interpreter):
    """`run(*inputs)`, with each tapped value replaced by the result of `visit(name, value)`."""

    def __init__(self, gm: fx.GraphModule, taps: Taps, visit: Visit) -> None:
        super().__init__(gm)
        self.visit, self.late = visit, taps.late
        self._inner, self._computed = taps.inner, dict[str, Any]()
        self._late_names = {name for names in taps.late.values() for name in names}
        self.names = frozenset(taps.names) - self._late_names
        self._kept: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        for name in self.late.get(n.name, ()):
            value = self._kept.pop(name)
            if (seen := self.visit(name, value)) is not value:
                value.copy_(seen)
        result = self.compute(n)
        if n.name in self._late_names:
            self._kept[n.name] = result
        if n.name not in self.names or is_in_flight(n):
            return result
        written = written_arguments(n)
        value = self.env[written[0]] if written else result
        if isinstance(value, Tensor):
            seen = self.visit(n.name, value)
            if not written:
                if n.name in self._inner:
                    self._computed[n.name] = value
                return with_strides_of(value, seen)
            if seen is not value:
                value.copy_(seen)
        return result

    def compute(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return getattr(self, n.op)(n.target, args, kwargs)

    def given(self, node: fx.Node, n: fx.Node) -> Any:
        """The value of an input `node` as `n` reads it."""
        is_inner = node.name in self._computed and n.name in self._inner[node.name]
        return self._computed[node.name] if is_inner else self.env[node]

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        return fx.node.map_arg(args, (lambda node: self.given(node, n)) if self._computed else self.env.__getitem__)


class WideRun(TappedRun):
    """The graph in float32 for 16-bit floats, and in float64 for float32: what it would compute without rounding.

    An operation without such a form (a quantised product, a fused kernel, a third-party op) computes as usual.

    Args:
        narrow: the model's own floating-point dtype.

    Attributes:
        computed_as_it_is: after `run`, the names of the operations without such a form.
    """

    def __init__(self, gm: fx.GraphModule, taps: Taps, visit: Visit, narrow: torch.dtype) -> None:
        super().__init__(gm, taps, visit)
        self.narrow = narrow
        self.wide = wider(narrow)
        self.computed_as_it_is: set[str] = set()

    def evaluate(self, nodes: Sequence[fx.Node], given: Mapping[fx.Node, Any], result: fx.Node) -> Any:
        """`passes.fx.slicing.evaluate` in wider numbers; tensors that are written in place are copied first."""
        written = writers_of(nodes)
        self.env = {node: value.clone() if node in written and isinstance(value, Tensor) else value for node, value in given.items()}
        with torch.no_grad():
            for node in nodes:
                if node not in self.env:
                    self.env[node] = self.run_node(node)
        return self.env[result]

    def compute(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method"):
            return super().compute(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        call = self.call_function if n.op == "call_function" else self.call_method
        if self._has_wide_form(n, (args, kwargs)):
            target = "to" if n.op == "call_method" and n.target in _NARROW_METHODS else n.target
            given = fx.node.map_aggregate((args, kwargs), self._widened)
            given = ((*given[0], self.wide), given[1]) if target != n.target else given
            try:
                return call(target, *given)
            except _NOT_IN_WIDE:
                pass  # computed in its own dtype below
        narrowed: dict[int, tuple[Tensor, Tensor]] = {}
        result = call(n.target, *fx.node.map_aggregate((args, kwargs), self._as_traced(n, narrowed)))
        for tensor, copied in narrowed.values():
            if copied._version:  # the op has written to it
                tensor.copy_(copied)
        self.computed_as_it_is.add(str(getattr(n.target, "__name__", n.target)))
        return result

    def _has_wide_form(self, n: fx.Node, given: Any) -> bool:
        if getattr(n.target, "__name__", "") in _NARROW_ONLY or _namespace(n.target) not in _TORCH_NAMESPACES:
            return False
        tensors = tensors_in(given)
        if writes_in_place(n) and tensors and self._is_narrow(tensors[0]):
            return False
        return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)

    def _is_narrow(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dtype.itemsize < self.wide.itemsize

    def _widened(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.wide) if self._is_narrow(value) else value
        if isinstance(value, torch.dtype):
            return self.wide if value.is_floating_point and value.itemsize < self.wide.itemsize else value
        return value

    def _as_traced(self, n: fx.Node, narrowed: dict[int, tuple[Tensor, Tensor]]) -> Callable[[Any], Any]:
        """A function that converts widened tensors back to their traced dtype or, if that is unknown, the model's.

        `narrowed` gets each of them with its copy.
        """
        traced = {id(self.given(node, n)): dtype for node in n.all_input_nodes if (dtype := dtype_of(node)) is not None}

        def as_traced(value: Any) -> Any:
            if not isinstance(value, Tensor) or type(value) is not Tensor or value.dtype != self.wide:
                return value
            dtype = traced.get(id(value), self.narrow)
            if dtype == value.dtype:
                return value
            if id(value) not in narrowed:
                narrowed[id(value)] = value, with_strides_of(value, value.to(dtype))
            return narrowed[id(value)][1]

        return as_traced


def with_strides_of(value: Tensor, changed: Tensor) -> Tensor:
    """`changed` with the strides of `value`, which later code may be compiled for; unchanged if elements of `value` share memory."""
    if changed is value or changed.stride() == value.stride() or _repeats(value):
        return changed
    return torch.empty_strided(value.shape, value.stride(), dtype=changed.dtype, device=changed.device).copy_(changed)


def _repeats(value: Tensor) -> bool:
    """Whether two of its elements may share memory."""
    reach = 0  # largest offset reached by the dims so far
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The tensors that an op without a result writes, in the order of its arguments; empty for any other node."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.returns:
        return []
    written = [
        node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        for index, argument in enumerate(node.target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [each for each in written if isinstance(each, fx.Node)]


def is_in_flight(node: fx.Node) -> bool:
    """Whether it starts a collective: its result may only be read by `wait_tensor`, which does not accept a copy of it."""
    names = [overload._schema.name for overload in overloads_of(node.target)[:1]]
    return any(name.startswith("_c10d_functional::") and name != "_c10d_functional::wait_tensor" for name in names)


def _namespace(target: Any) -> str:
    """The namespace of an op; functions and methods of torch count as ATen's."""
    overloads = overloads_of(target)
    return overloads[0].namespace if overloads else _TORCH_NAMESPACES[0]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, inside lists, tuples and dicts of any depth."""
    leaves: list[Any] = []
    fx.node.map_aggregate(value, leaves.append)  # takes a fifth of the time of tree_leaves
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
