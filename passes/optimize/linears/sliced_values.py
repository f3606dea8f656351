"""Whether a value may become a slice of a wider tensor: what computes on it must take its strides."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator

from paged_attn.attn_ops.ops.define import overloads_of
from paged_attn.passes.fx.graph_tools import call, reached, value_of
from paged_attn.passes.fx.memory import bases_of, writes_in_place
from paged_attn.passes.fx.slicing import kind_of, layout_text

_ANY_STRIDES = ("aten", "prims", "paged_attn")
_PYTORCH = ("torch", "_operator", "builtins", "math")
_PADDING = 64  # elements on either side; a multiple of any alignment


class SlicedValues:
    """Answers questions about the nodes of one graph. Nodes of equal shape with equal views and users, as in all layers, share answers."""

    def __init__(self) -> None:
        self._takes: dict[Hashable, bool] = {}
        self._values: dict[Hashable, list[Any]] = {}

    def takes_slices(self, node: fx.Node) -> bool:
        """Whether `node`'s value [..., n] may be strided: no view needs it dense, and it is neither an output nor passed to a foreign op.

        A foreign kernel may assume that its memory is dense.
        """
        views = _views_of(node)
        uses = tuple((user.op, user.target) for view in (node, *views) for user in view.users)
        kind = (layout_text(value_of(node)), kind_of([node, *views], {node: ""}), uses)
        if kind not in self._takes:
            self._takes[kind] = _takes_slices(node, views)
        return self._takes[kind]

    def takes(self, node: fx.Node, value: Tensor) -> bool:
        """Whether `node` may be `value`, of other strides: no view needs those that it has, and it is not passed to a foreign op."""
        try:
            views = self.of_views(node, value)
        except (RuntimeError, ValueError):  # a view() that would need a copy
            return False
        users = {user for view in (node, *views) for user in view.users}
        return all(user.op == "output" or _takes_strides(user) for user in users)

    def of_views(self, node: fx.Node, value: Tensor) -> dict[fx.Node, Any]:
        """The example values of all views of `node`, and of their views, if `value` is `node`'s. Layers share them; nothing writes to them.

        Raises:
            RuntimeError, ValueError: a view is impossible with these strides.
        """
        views = _views_of(node)
        kind = (layout_text(value), kind_of([node, *views], {node: ""}))
        if kind not in self._values:
            self._values[kind] = _values_of(node, value, views)
        return dict(zip(views, self._values[kind], strict=True))

    def of_product(self, given: Tensor, owned: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """The example values of `F.linear(given, *owned)` and of its slices of these sizes; also shared between layers."""
        kind = (layout_text(given), tuple(map(layout_text, owned)), tuple(sizes))
        if kind not in self._values:
            with enable_python_dispatcher():  # needed by composite operations on symbolic sizes (torch 2.11)
                product = F.linear(given, *owned)
                starts = accumulate(sizes, initial=0)
                self._values[kind] = [product, *(product.narrow(-1, start, size) for start, size in zip(starts, sizes, strict=False))]
        return self._values[kind]


def _views_of(node: fx.Node) -> list[fx.Node]:
    """The views of a node, and their views, in an order that depends only on the graph."""

    def shown(viewed: fx.Node) -> Iterator[fx.Node]:
        return (user for user in viewed.users if user.args and user.args[0] is viewed and viewed in bases_of([user]))

    return list(reached([node], shown))[1:]


def _takes_slices(node: fx.Node, views: list[fx.Node]) -> bool:
    value = value_of(node)
    wide = value.new_empty((*value.shape[:-1], value.shape[-1] + 2 * _PADDING))
    try:
        _values_of(node, wide.narrow(-1, _PADDING, value.shape[-1]), views)
    except (RuntimeError, ValueError):  # a view() that would need a copy
        return False
    return all(_takes_strides(user) for view in (node, *views) for user in view.users)


def _values_of(node: fx.Node, value: Tensor, views: list[fx.Node]) -> list[Any]:
    found: dict[fx.Node, Any] = {node: value}
    for view in views:
        found[view] = _evaluate(view, found)
    return [found[view] for view in views]


def _evaluate(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    def value(argument: fx.Node) -> Any:
        return known[argument] if argument in known else value_of(argument)

    if writes_in_place(node):
        return value(node.args[0])  # type: ignore[arg-type]
    return call(node, fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value))


def _takes_strides(user: fx.Node) -> bool:
    target = user.target
    if user.op == "call_method":
        return target != "as_strided"
    if user.op != "call_function":
        return False
    if overloads := overloads_of(target):  # Dynamo's `torch.ops.mylib.op` is a packet, of a module of PyTorch's
        names = [overload.name().split("::") for overload in overloads]
        return all(namespace in _ANY_STRIDES and not name.startswith("as_strided") for namespace, name in names)
    module = getattr(target, "__module__", None) or "torch"
    return module.split(".")[0] in _PYTORCH and not isinstance(target, HigherOrderOperator) and target is not torch.as_strided
