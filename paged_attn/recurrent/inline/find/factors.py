"""Tensors as products of smaller ones: outer products and broadcast multiplications, taken apart as far as a graph shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from paged_attn.recurrent.inline.find.dims import Dims, before_view, broadcast, is_tensor, sizes, viewed

aten = torch.ops.aten


@dataclass(frozen=True)
class Factor:
    """A node's tensor, and the axes that its dimensions hold; or a number (no dims)."""

    node: fx.Node | float
    dims: Dims = ()

    @property
    def axes(self) -> frozenset[int]:
        return frozenset(axis for dim in self.dims for axis in dim)


def factors_of(factor: Factor, axes: Mapping[int, int]) -> list[Factor]:
    """Factors whose product it is, each of which the graph does not take apart any more."""
    node, dims = factor.node, factor.dims
    if not isinstance(node, fx.Node):
        return [factor]
    if viewed(node) is not None:
        before = before_view(node, dims, axes)
        return [factor] if before is None else factors_of(Factor(viewed(node), before), axes)  # type: ignore[arg-type]
    if node.target is aten.expand.default:
        return factors_of(operand(node.args[0], dims), axes)
    if node.target is aten.neg.default:
        return [Factor(-1.0), *factors_of(Factor(node.args[0], dims), axes)]  # type: ignore[arg-type]
    if node.target is aten.mul.Tensor:
        return [each for arg in node.args for each in factors_of(operand(arg, dims), axes)]
    if node.target is aten.bmm.default and sizes(node.args[0])[2] == 1:  # type: ignore[arg-type]
        batch, outer, inner = dims
        left, right = operand(node.args[0], (batch, outer, ())), operand(node.args[1], (batch, (), inner))
        return [*factors_of(left, axes), *factors_of(right, axes)]
    return [factor]


def operand(value: object, dims: Dims) -> Factor:
    """An operand of an elementwise operation whose result has `dims`."""
    if not isinstance(value, fx.Node):
        return Factor(float(value))  # type: ignore[arg-type]
    return Factor(value, broadcast(dims, sizes(value)))


def reduced(factors: list[Factor]) -> tuple[Factor, ...]:
    """Without factors of one."""
    return tuple(each for each in factors if is_tensor(each.node) or each.node != 1)


def constant(factors: Sequence[Factor]) -> float:
    """The product of those factors that are numbers; `without_constants`: the other factors."""
    return math.prod(each.node for each in factors if not isinstance(each.node, fx.Node))


def without_constants(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    return tuple(each for each in factors if isinstance(each.node, fx.Node))
