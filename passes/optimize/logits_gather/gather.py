"""What is computed for rows that nobody asks for: the rows whose logits are wanted are picked as far up the graph as is proved.

Before: attention(q, k, v, out); x = x + o_proj(out); x = x + mlp(norm(x)) [1, T, H]; logits = lm_head(norm(x)[:, rows]) [1, N, V]
After:  attention(q, k, v, out); x = x[:, rows] + o_proj(out[rows]); x = x + mlp(norm(x)) [1, N, H]; logits = lm_head(norm(x))

What moves treats rows apart by structure (`row_ops`) and is read by nothing but the picking (`row_region`); and before anything is
changed both orders are computed on random numbers.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import depends_on, name_of, remove_dead_code, value_of
from paged_attn.passes.fx.row_layout import Rows, plain_rows
from paged_attn.passes.optimize.logits_gather.gathered_region import GatheredRegion, agrees
from paged_attn.passes.optimize.logits_gather.row_ops import is_moving
from paged_attn.passes.optimize.logits_gather.row_region import find_region

logger = logging.getLogger("paged_attn")
aten = torch.ops.aten


@dataclass(frozen=True)
class _Picking:
    """A node that takes `rows` [N] of `source` along `axis`."""

    node: fx.Node
    source: fx.Node
    axis: int
    rows: fx.Node


def gather_logits_early(graph: fx.Graph, form: CallForm, values: Values) -> int:
    """Rewrite in place; returns how many nodes compute fewer rows now. What is found does not rest on the numbers of `values`."""
    if isinstance(form.num_tokens, int):
        return 0
    pickings = [picking for node in graph.nodes if (picking := _picking_of(node, form)) is not None]
    moved = 0
    for rows in dict.fromkeys(picking.rows for picking in pickings):
        moved += _move(graph, form, values, [picking for picking in pickings if picking.rows is rows])
    if moved:
        remove_dead_code(graph)
        logger.info("%d nodes compute the wanted rows only", moved)
    return moved


def _picking_of(node: fx.Node, form: CallForm) -> _Picking | None:
    """Reads x[:, rows], index_select(x, 1, rows) and aten.index(x, [None, rows])."""
    found: tuple[Any, int, Any] | None = None
    if name_of(node) == "getitem" and node.target is operator.getitem:
        found = _only_index(node.args[0], node.args[1], (slice(None),))
    elif node.target is aten.index.Tensor:
        found = _only_index(node.args[0], node.args[1], (None,))
    elif name_of(node) == "index_select" and len(node.args) == 3:
        found = (node.args[0], node.args[1], node.args[2])  # type: ignore[assignment]
    if found is None or not isinstance(found[0], fx.Node) or not isinstance(found[1], int) or not isinstance(found[2], fx.Node):
        return None
    source, axis, rows = found
    value, index = value_of(source), value_of(rows)
    is_index = rows.op == "placeholder" and isinstance(index, FakeTensor) and index.dim() == 1 and index.dtype in (torch.int64, torch.int32)
    if not is_index or depends_on(index.shape[0], form.num_tokens) or not isinstance(value, Tensor):
        return None
    layout = plain_rows(value, form.num_tokens)
    return _Picking(node, source, axis % value.dim(), rows) if layout == Rows(axis % value.dim()) else None


def _only_index(source: Any, index: Any, others: tuple[Any, ...]) -> tuple[Any, int, Any] | None:
    """The one index among those that take all."""
    indices = list(index) if isinstance(index, (tuple, list)) else [index]
    tensors = [number for number, each in enumerate(indices) if isinstance(each, fx.Node)]
    if len(tensors) != 1 or any(each not in others for each in indices if not isinstance(each, fx.Node)):
        return None
    return source, tensors[0], indices[tensors[0]]


def _move(graph: fx.Graph, form: CallForm, values: Values, pickings: list[_Picking]) -> int:
    region = find_region(graph, {picking.node for picking in pickings}, form.num_tokens)
    moving = [each for each in pickings if region.layouts.get(each.source) == Rows(each.axis)]
    if len(moving) < len(pickings):
        return _move(graph, form, values, moving) if moving else 0
    if not any(not is_moving(node) for node in region.layouts):
        return 0
    fewer = GatheredRegion(form, region, pickings[0].rows)
    sources = {picking.source: picking.axis for picking in pickings}
    if not fewer.fits() or not agrees(fewer, sources, values):
        logger.info("rows are picked where the model picks them: before it, the same operations gave something else")
        return 0
    fewer.apply()
    for picking in pickings:
        picking.node.replace_all_uses_with(picking.source)
        graph.erase_node(picking.node)
    return len(region.layouts)
