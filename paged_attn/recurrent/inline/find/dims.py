"""Which axes of a state the dimensions of a tensor hold, followed through views of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

ROWS = -1  # the axis of a batch's rows; the axes of a state count from 0
# For each dimension of a tensor, the axes that it holds, the outermost first; () for one of size 1. No axis has size 1.
Dims = tuple[tuple[int, ...], ...]
aten = torch.ops.aten
_REGROUPED = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_STRIDED = {
    aten.transpose.int, aten.permute.default, aten.t.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.select.int, aten.slice.Tensor, aten.expand.default, aten.alias.default, aten.detach.default,
}  # fmt: skip
_SAME = {aten.clone.default, aten._to_copy.default}


class SplitAxis(Exception):
    """A view cuts an axis of a state into an outer part and an inner one of this size."""

    def __init__(self, axis: int, inner: int) -> None:
        super().__init__(axis, inner)
        self.axis, self.inner = axis, inner


def number(value: Any) -> Any:
    """A number, also where it is a node: the traced one."""
    return value.meta["val"] if isinstance(value, fx.Node) else value


def sizes(node: fx.Node) -> tuple[int, ...]:
    """The traced shape of a node's tensor."""
    return tuple(node.meta["val"].shape)


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def viewed(node: fx.Node) -> fx.Node | None:
    """The tensor that a node shows in another shape or dtype, or None."""
    if node.target in _REGROUPED | _STRIDED | _SAME:
        return node.args[0]  # type: ignore[return-value]
    if node.target is aten.cat.default and len(node.args[0]) == 1:  # type: ignore[arg-type]
        return node.args[0][0]  # type: ignore[index, return-value]
    return None


def after_view(node: fx.Node, given: Dims, axes: Mapping[int, int]) -> Dims | None:
    """The dims of a view of a tensor that has these; None if it shows only a part, or repeats it.

    Raises:
        SplitAxis: one of its dimensions holds a part of an axis.
    """
    if node.target in _REGROUPED:
        return _regrouped(given, sizes(node), axes, split=True)
    if (origins := _origins(node)) is None:
        return given
    found = tuple(given[origin] if origin is not None else () for origin in origins)
    held = [axis for dim in given for axis in dim]
    same = sorted(axis for dim in found for axis in dim) == sorted(held)
    return found if same and fits(found, sizes(node), axes) else None


def before_view(node: fx.Node, shown: Dims, axes: Mapping[int, int]) -> Dims | None:
    """The dims of the tensor of which a node with these dims is a view; None if the view cannot be followed."""
    tensor = viewed(node)
    assert tensor is not None
    if node.target in _REGROUPED:
        return _regrouped(shown, sizes(tensor), axes, split=False)
    if (origins := _origins(node)) is None:
        return shown
    found: list[tuple[int, ...]] = [()] * len(sizes(tensor))
    for dim, origin in zip(shown, origins, strict=True):
        if origin is not None:
            found[origin] = dim
    return tuple(found) if fits(found, sizes(tensor), axes) else None


def fits(dims: Sequence[tuple[int, ...]], shape: Sequence[int], axes: Mapping[int, int]) -> bool:
    """Whether a tensor of this shape can hold these axes."""
    return len(dims) == len(shape) and all(_product(dim, axes) == size for dim, size in zip(dims, shape, strict=True))


def broadcast(dims: Dims, shape: Sequence[int]) -> Dims:
    """The dims of an operand of this shape, of an elementwise operation whose result has `dims`."""
    aligned = dims[len(dims) - len(shape) :]
    return tuple(dim if size > 1 else () for dim, size in zip(aligned, shape, strict=True))


def _product(dim: Sequence[int], axes: Mapping[int, int]) -> int:
    product = 1
    for axis in dim:
        product *= axes[axis]
    return product


def _regrouped(given: Dims, shape: Sequence[int], axes: Mapping[int, int], split: bool) -> Dims | None:
    pending, found = [axis for dim in given for axis in dim], []
    for size in shape:
        taken, product = list[int](), 1
        while product < size and pending:
            axis = pending.pop(0)
            taken.append(axis)
            product *= axes[axis]
        if product != size:
            before = product // axes[taken[-1]] if taken else 1
            if split and taken and size % before == 0 and product % size == 0 and taken[-1] != ROWS:
                raise SplitAxis(taken[-1], product // size)
            return None
        found.append(tuple(taken))
    return None if pending else tuple(found)


def _origins(node: fx.Node) -> list[int | None] | None:
    """For each dimension of a strided view, the dimension of the tensor that it shows; None for one of size 1 or one that repeats. None
    if all dimensions are the tensor's own."""
    if node.target not in _STRIDED:
        return None
    shape = sizes(node.args[0])  # type: ignore[arg-type]
    strides = [2 ** (40 - i) for i in range(len(shape))]  # told apart by their strides
    tensor = torch.empty_strided(shape, strides, device="meta")
    rest = [[number(each) for each in arg] if isinstance(arg, (list, tuple)) else number(arg) for arg in node.args[1:]]
    shown = node.target(tensor, *rest, **node.kwargs)
    return [
        strides.index(stride) if size > 1 and stride in strides else None for size, stride in zip(shown.shape, shown.stride(), strict=True)
    ]
