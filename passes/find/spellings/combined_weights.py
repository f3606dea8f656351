"""Multiplies every softmax of a combination of weights with the values by itself, and combines the results instead.

Before: w = softmax(scores).view(1, heads, 2, T, T); out = (w[:, :, 0] - factor * w[:, :, 1]) @ v        as in differential attention
After:  each = w @ v[:, :, None]; out = each[:, :, 0] - factor * each[:, :, 1]
        since the product is linear in the weights, and what combines them does not look at tokens
Leaves alone: weights of one softmax, factors of tokens, heads that are taken in other ways, operations in place, products that are einsums.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.passes.fx.graph_tools import arguments_of, call_with_value, name_of, op_name, shape_of, take_place, token_dims, value_of
from paged_attn.passes.fx.memory import is_written, writes_in_place

_MATMUL = {torch.matmul, operator.matmul, "matmul", "__matmul__"}
_SAME_NUMBERS = {"to", "float", "type", "type_as", "half", "bfloat16", "contiguous", "clone", "dropout"}
_LAYOUT = {"view", "reshape", "unflatten"}


def distribute_products(graph: fx.Graph, softmaxes: Collection[fx.Node], num_tokens: Any) -> None:
    """Rewrites every product of combined weights in place."""
    for node in list(graph.nodes):
        left, right = (*node.args, None, None)[:2]
        if node.target not in _MATMUL or node.kwargs or not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            continue
        if token_dims(left, num_tokens) < 2 or token_dims(right, num_tokens) != 1 or len(shape_of(left)) != len(shape_of(right)):
            continue
        products = _Products(node, frozenset(softmaxes), num_tokens)
        if not products.combines(left):
            continue
        with graph.inserting_before(node):
            result = products.of(left, right, ())
        take_place(node, result)


@dataclass
class _Products:
    """The products of the weights that go into one product's weights with its values; equal ones are computed once."""

    node: fx.Node
    softmaxes: frozenset[fx.Node]
    num_tokens: Any
    made: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)

    def combines(self, weights: fx.Node) -> bool:
        """Whether these are sums of several softmaxes' weights, or of several heads', by known operations only."""
        pending, nodes, sums = [weights], set[fx.Node](), 0
        while pending:
            node = pending.pop()
            parts = self._parts(node)
            nodes.add(node)
            pending += parts
            if parts and is_written({*node.all_input_nodes} - {*parts}, node, self.node):
                return False  # a factor, which is read later than it was
            sums += len(parts) > 1
            while not parts and node not in self.softmaxes:
                if op_name(node) not in _LAYOUT | _SAME_NUMBERS or writes_in_place(node):
                    return False
                node = node.all_input_nodes[0]
                nodes.add(node)
        return sums > 0 and not is_written(nodes, min(nodes), self.node)

    def _parts(self, node: fx.Node) -> list[fx.Node]:
        """The weights that a node combines, scales or takes heads of; none if it does nothing of this."""
        name, given = op_name(node), [arg for arg in node.args if isinstance(arg, fx.Node) and self._are_weights(arg)]
        if name in ("add", "sub") and len(given) == len(node.args) == 2 and not node.kwargs:
            return given if all(shape_of(each) == shape_of(node) for each in given) else []
        if name in ("mul", "div", "truediv") and len(given) == 1 and len(node.args) == 2 and not node.kwargs:
            by = node.args[1] if node.args[0] is given[0] else node.args[0]
            return given if _is_factor(by, node) and (name == "mul" or by is node.args[1]) else []
        if name in _SAME_NUMBERS and given and given[0] is node.args[0]:
            return given[:1]
        if node.target is operator.getitem:
            return [taken.source] if (taken := _Taken.of(node)) is not None and self._are_weights(taken.source) else []
        return []

    def _are_weights(self, node: fx.Node) -> bool:
        return isinstance(value_of(node), Tensor) and token_dims(node, self.num_tokens) >= 2

    def of(self, weights: fx.Node, values: fx.Node, after: tuple[fx.Node, ...]) -> fx.Node:
        """weights @ values; `after`: operations that leave the numbers of the weights as they are, the last one first."""
        parts = self._parts(weights)
        if not parts:
            for each in reversed(after):
                weights = self._call(each.target, weights, *each.args[1:], **each.kwargs)
            product = self._call(torch.matmul, weights, values)
            product.meta["nn_module_stack"] = self.node.meta.get("nn_module_stack")
            return product
        if op_name(weights) in _SAME_NUMBERS:
            changes = op_name(weights) == "dropout" or value_of(weights).dtype != value_of(parts[0]).dtype
            return self.of(parts[0], values, (*after, weights) if changes else after)
        if (taken := _Taken.of(weights)) is not None:
            for dim, how, count in taken.undone:
                values = self._spread(values, dim, how, count, shape_of(taken.source)[dim])
            return taken.again(self.of(parts[0], values, after), self._call)
        new = {part: self.of(part, values, after) for part in parts}
        return self._call(weights.target, *(new.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in weights.args))

    def _spread(self, values: fx.Node, dim: int, how: str, count: int, heads: Any) -> fx.Node:
        if how == "unsqueeze":
            return self._call("unsqueeze", values, dim)
        if shape_of(values)[dim] == 1:  # one head of values for all
            return self._call("repeat_interleave", values, heads, dim)
        return self._call("repeat_interleave", values, count, dim) if how == "each" else self._call(torch.cat, (values,) * count, dim)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        key = (target, repr(args), repr(kwargs))
        if key not in self.made:
            self.made[key] = call_with_value(self.node.graph, target, *args, **kwargs)
        return self.made[key]


def _is_factor(by: Any, node: fx.Node) -> bool:
    """Whether a number, or a tensor of numbers, is the same for all queries and keys of `node`."""
    if not isinstance(by, fx.Node):
        return isinstance(by, (int, float))
    shape = shape_of(by)
    return isinstance(value_of(by), Tensor) and len(shape) <= len(shape_of(node)) and all(size == 1 for size in shape[-2:])


@dataclass(frozen=True)
class _Taken:
    """Some heads of weights: by an index, by a slice, or as one of equal chunks.

    Attributes:
        undone: (dim, how, how often): how values spread over all heads, so that those that are taken get theirs.
    """

    node: fx.Node
    source: fx.Node
    undone: tuple[tuple[int, str, int], ...]

    @classmethod
    def of(cls, node: fx.Node) -> _Taken | None:
        if node.target is not operator.getitem:
            return None
        source, index = node.args
        assert isinstance(source, fx.Node)
        if name_of(source) == "chunk":
            return cls._of_chunk(node, source, index)
        index = index if isinstance(index, tuple) else (index,)
        if not isinstance(value_of(source), Tensor) or len(index) > len(shape_of(source)) - 2:
            return None
        undone: list[tuple[int, str, int]] = []
        for dim, part in enumerate(index):
            if isinstance(part, int):
                undone.append((dim, "unsqueeze", 1))
            elif not isinstance(part, slice) or any(isinstance(each, fx.Node) for each in (part.start, part.stop, part.step)):
                return None
            elif part != slice(None):
                size = shape_of(source)[dim]
                if not isinstance(size, int) or (spread := _spread_of(range(size)[part], size)) is None:
                    return None
                undone.append((dim, *spread))
        return cls(node, source, tuple(undone))

    @classmethod
    def _of_chunk(cls, node: fx.Node, chunk: fx.Node, index: Any) -> _Taken | None:
        given = arguments_of(chunk, ("input", "chunks", "dim"))
        source, dim = given.get("input"), given.get("dim", 0)
        if not isinstance(source, fx.Node) or not isinstance(index, int) or not isinstance(dim, int):
            return None
        rank, dim = len(shape_of(source)), dim % len(shape_of(source))
        size, part = shape_of(source)[dim], shape_of(node)[dim]
        if dim >= rank - 2 or not isinstance(size, int) or size % part:
            return None
        return cls(node, source, ((dim, "all", size // part),))

    def again(self, product: fx.Node, call: Any) -> fx.Node:
        """The same heads of a product of all heads."""
        made, index = self.node.args
        assert isinstance(made, fx.Node)
        if made is not self.source:  # a chunk
            given = arguments_of(made, ("input", "chunks", "dim"))
            product = call(torch.chunk, product, given["chunks"], given.get("dim", 0))
        result: fx.Node = call(operator.getitem, product, index)
        return result


def _spread_of(taken: Sequence[int], size: int) -> tuple[str, int] | None:
    """How often each value ("each"), or all of them ("all"), must come for the heads `taken` to get the values in order."""
    if not taken or size % len(taken):
        return None
    count = size // len(taken)
    if [head // count for head in taken] == [*range(len(taken))]:
        return "each", count
    return ("all", count) if [head % len(taken) for head in taken] == [*range(len(taken))] else None
