"""The layout of an attention's operands in the values that the traced graph computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import copied_from, shape_at, value_of
from paged_attn.passes.fx.row_layout import plain_rows
from paged_attn.passes.fx.slicing import evaluate
from paged_attn.passes.replace.kv_heads import PROBE_TOKENS, KVSource, concrete, rows_in


@dataclass(frozen=True)
class Operand:
    """Query, key or value [T, heads, dim] of a paged op, as elements of the rows of a value of the traced graph.

    Attributes:
        name: of the node in the traced graph.
        offset, head_stride, dim_stride: element (h, d) of a token is element `offset + h * head_stride + d * dim_stride` of its row, where
            the value's other dims are flattened.
        late: the value is written in place before the attention reads it.
    """

    name: str
    heads: int
    dim: int
    offset: int
    head_stride: int
    dim_stride: int
    late: bool = False

    def of(self, rows: Tensor) -> Tensor:
        """[T, heads, dim] of the value's rows [T, ...]."""
        heads = torch.arange(self.heads, device=rows.device)[:, None] * self.head_stride
        return rows.flatten(1)[:, self.offset + heads + torch.arange(self.dim, device=rows.device) * self.dim_stride]


def operand_of(source: KVSource, form: CallForm) -> Operand | None:
    """Follows an operand back to a node that also exists in the traced graph, and finds on distinct numbers where its elements come from.

    None if anything on the way is more than a change of layout, or if the node does not have one row per token.
    """
    chain: list[fx.Node] = []
    node = source.base
    while (name := copied_from(node)) is None:
        inputs = [each for each in node.all_input_nodes if isinstance(value_of(each), Tensor)]
        if len(inputs) != 1:
            return None
        chain.insert(0, node)
        node = inputs[0]
    layout = plain_rows(value_of(node), form.num_tokens)
    if layout is None:
        return None
    shape = shape_at(node, form.num_tokens, PROBE_TOKENS)
    others = [size for axis, size in enumerate(shape) if axis != layout.axis]
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(PROBE_TOKENS, *others)
    given: dict[fx.Node, Any] = {node: numbers.movedim(0, layout.axis)}
    for each in chain:
        given |= {other: concrete(value_of(other), form) for other in each.all_input_nodes if other not in chain and other not in given}
    return _affine(str(name), rows_in(evaluate(chain, given, source.base), source), numbers[0].numel())


def _affine(name: str, operand: Tensor, width: int) -> Operand | None:
    """The layout of `operand` [T, heads, dim], which holds the indices of its elements among T rows of `width` elements."""
    elements = operand - width * torch.arange(len(operand))[:, None, None]
    heads, dim = operand.shape[1:]
    first = elements[0]
    head_stride = int(first[1, 0] - first[0, 0]) if heads > 1 else 0
    dim_stride = int(first[0, 1] - first[0, 0]) if dim > 1 else 0
    found = Operand(name, heads, dim, int(first[0, 0]), head_stride, dim_stride)
    corners = [found.offset + h * head_stride + d * dim_stride for h in (0, heads - 1) for d in (0, dim - 1)]
    if min(corners) < 0 or max(corners) >= width:
        return None  # the strides differ between elements
    return found if torch.equal(found.of(torch.arange(width)[None].expand(len(operand), -1)).double(), elements) else None
