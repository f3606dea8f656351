"""Makes an op's operands of the factors that were found in the graph of a layer's step."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from paged_attn.recurrent.inline.find.dims import ROWS, Dims, viewed
from paged_attn.recurrent.inline.find.factors import Factor
from paged_attn.recurrent.inline.find.forms import Recurrence
from paged_attn.recurrent.inline.step_graph import StepGraph

aten = torch.ops.aten
SMALLEST = torch.finfo(torch.float32).tiny  # a decay that is no larger has forgotten everything
LOWEST = math.log(SMALLEST)  # Trap: a logarithm of -1e38, to which every sum of it and others is rounded


class Operands:
    """Makes nodes where the graph inserts them.

    Args:
        axes: the sizes of all axes; `heads`: those that are H, or the channels; `values`: those that are V.
    """

    def __init__(self, step: StepGraph, axes: Mapping[int, int], heads: Sequence[int], values: Sequence[int] = ()) -> None:
        self.step, self.axes, self.heads, self.values = step, axes, [*heads], [*values]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.step.graph.call_function(target, args, kwargs)

    def made(self, target: Any, shape: Sequence[Any], *value: Any, dtype: torch.dtype = torch.float32) -> fx.Node:
        """A new tensor on the device of the layer's rows, by `new_empty` or the like."""
        return self.call(target, self.step.inputs[0], list(shape), *value, dtype=dtype)

    def float32(self, node: fx.Node) -> fx.Node:
        return self.call(aten._to_copy.default, node, dtype=torch.float32)

    def product(self, factors: Sequence[Factor], last: Sequence[int]) -> fx.Node:
        """[rows, H, X]: the product of these factors, with the axes in `last` as X."""
        return self._flat(self._multiplied(factors, last), last)

    def summed(self, products: Sequence[Sequence[Factor]]) -> fx.Node:
        """[rows, H] in float32: the sum of products of factors."""
        terms = [self.float32(self.call(aten.squeeze.dim, self.product(each, []), 2)) for each in products]
        result = terms[0] if terms else self.made(aten.new_zeros.default, (self.step.rows, self.count(self.heads)))
        for term in terms[1:]:
            result = self.call(aten.add.Tensor, result, term)
        return result

    def per_channel(self, factors: Sequence[Factor], last: Sequence[int]) -> fx.Node:
        """[H, X]: the same of factors without rows."""
        sizes = [self.axes[axis] for axis in (*self.heads, *last)]
        full = self.call(aten.expand.default, self._multiplied(factors, last), [1, *sizes])
        return self.call(aten.reshape.default, full, [self.count(self.heads), self.count(last)])

    def _multiplied(self, factors: Sequence[Factor], last: Sequence[int]) -> fx.Node:
        tensors = [self._arranged(factor, last) for factor in factors if isinstance(factor.node, fx.Node)]
        result = tensors[0] if tensors else self._ones(last)
        for other in (*tensors[1:], *(factor.node for factor in factors if not isinstance(factor.node, fx.Node))):
            result = self.call(aten.mul.Tensor, result, other)
        return result

    def decays(self, found: Recurrence) -> fx.Node:
        """[rows, H] or [rows, H, K]: the logarithm of the decay, in float32."""
        last = found.keys if found.decays_by_channel else []
        terms = [self._arranged(self._logarithm(factor), last) for factor in found.decay]
        result = terms[0] if terms else self.call(aten.zeros_like.default, self._ones(last))
        for term in terms[1:]:
            result = self.call(aten.add.Tensor, result, term)
        result = self._flat(result, last)
        return result if found.decays_by_channel else self.call(aten.squeeze.dim, result, 2)

    def _logarithm(self, factor: Factor) -> Factor:
        node = factor.node
        if not isinstance(node, fx.Node):
            ones = self._ones([])
            scaled = self.call(aten.mul.Tensor, ones, node)
            return Factor(self._log(scaled), ((),) * (2 + len(self.heads)))
        node = inside = self.step.now(node)
        while inside.target is aten._to_copy.default:
            inside = viewed(inside)  # type: ignore[assignment]
        if inside.target is aten.exp.default:
            given = self.float32(inside.args[0])  # type: ignore[arg-type]
            return Factor(self.call(aten.clamp_min.default, given, LOWEST), factor.dims)
        return Factor(self._log(node), factor.dims)

    def _log(self, node: fx.Node) -> fx.Node:
        return self.call(aten.log.default, self.call(aten.clamp_min.default, self.float32(node), SMALLEST))

    def _ones(self, last: Sequence[int]) -> fx.Node:
        """[1, ...] in the dtype of the layer's rows."""
        return self.call(aten.new_ones.default, self.step.inputs[0], [1] * (1 + len(self.heads) + len(last)))

    def _arranged(self, factor: Factor, last: Sequence[int]) -> fx.Node:
        """[rows or 1, heads or 1, ..., last or 1, ...]"""
        have = [axis for dim in factor.dims for axis in dim]
        wanted = [ROWS, *self.heads, *last]
        present = [axis for axis in wanted if axis in have]
        assert isinstance(factor.node, fx.Node)
        node = self.step.now(factor.node)
        if present != have:
            node = self.call(aten.reshape.default, node, [self._size(axis) for axis in have])
            node = self.call(aten.permute.default, node, [have.index(axis) for axis in present])
        return self.call(aten.reshape.default, node, [self._size(axis) if axis in have else 1 for axis in wanted])

    def _flat(self, node: fx.Node, last: Sequence[int]) -> fx.Node:
        """[rows, H, X] of what is arranged."""
        full = self.call(aten.expand.default, node, [self._size(axis) for axis in (ROWS, *self.heads, *last)])
        if (len(self.heads), len(last)) == (1, 1):
            return full
        return self.call(aten.reshape.default, full, [self.step.rows, self.count(self.heads), self.count(last)])

    def as_read(self, output: fx.Node, dims: Dims, node: fx.Node) -> fx.Node:
        """The op's output [rows, H, V] in the place of `node`, in its shape and dtype."""
        order = [ROWS, *self.heads, *self.values]
        have = [axis for dim in dims for axis in dim]
        result = output
        if have != order:
            result = self.call(aten.reshape.default, result, [self._size(axis) for axis in order])
            result = self.call(aten.permute.default, result, [order.index(axis) for axis in have])
        shape = [self.step.rows if size == (ROWS,) else self._product(size) for size in dims]
        result = self.call(aten.reshape.default, result, shape)
        return self.call(aten._to_copy.default, result, dtype=node.meta["val"].dtype)

    def _product(self, axes: Sequence[int]) -> Any:
        """The size of a dimension that holds these axes."""
        if ROWS not in axes:
            return self.count(axes)
        return self.call(operator.mul, self.step.rows, self.count([axis for axis in axes if axis != ROWS]))

    def _size(self, axis: int) -> Any:
        return self.step.rows if axis == ROWS else self.axes[axis]

    def count(self, axes: Sequence[int]) -> int:
        return int(torch.Size(self.axes[axis] for axis in axes).numel())
