"""Avoids computing unwanted rows: picks the rows whose logits are wanted as far up the graph as can be proved correct.

Before: attention(q, k, v, out); x = x + o_proj(out); x = x + mlp(norm(x)) [1, T, H]; logits = lm_head(norm(x)[:, rows]) [1, N, V]
After:  attention(q, k, v, out); x = x[:, rows] + o_proj(out[rows]); x = x + mlp(norm(x)) [1, N, H]; logits = lm_head(norm(x))

Everything that moves treats rows independently by structure (`row_ops`) and is read only by the picking (`row_region`). Before anything is
changed, both orders are computed on random numbers and compared.
"""

from __future__ import annotations

import logging

import torch
from torch import fx
from torch._subclasses import FakeTensor

from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import depends_on, remove_dead_code, value_of
from paged_attn.passes.fx.row_layout import Rows, plain_rows
from paged_attn.passes.fx.token_data import Lookup, lookup_of
from paged_attn.passes.optimize.logits_gather.gathered_region import GatheredRegion, agrees
from paged_attn.passes.optimize.logits_gather.row_ops import is_moving
from paged_attn.passes.optimize.logits_gather.row_region import find_row_region

logger = logging.getLogger("paged_attn")
aten = torch.ops.aten


def gather_logits_early(graph: fx.Graph, form: CallForm, values: Values) -> int:
    """Rewrites in place; returns how many nodes now compute fewer rows. The result does not depend on the contents of `values`."""
    if isinstance(form.num_tokens, int):
        return 0
    pickings = [picking for node in graph.nodes if (picking := _picking_of(node, form)) is not None]
    moved = 0
    for rows in dict.fromkeys(picking.at for picking in pickings):
        moved += _move(graph, form, values, [picking for picking in pickings if picking.at is rows])
    if moved:
        remove_dead_code(graph)
        logger.info("%d nodes compute only the wanted rows", moved)
    return moved


def _picking_of(node: fx.Node, form: CallForm) -> Lookup | None:
    """A lookup of token rows by an input of the graph [N], such as x[:, rows]; None for any other node."""
    found = lookup_of(node)
    index = None if found is None or found.at.op != "placeholder" else value_of(found.at)
    if found is None or not isinstance(index, FakeTensor) or index.dim() != 1 or depends_on(index.shape[0], form.num_tokens):
        return None
    return found if plain_rows(value_of(found.rows), form.num_tokens) == Rows(found.axis) else None


def _move(graph: fx.Graph, form: CallForm, values: Values, pickings: list[Lookup]) -> int:
    region = find_row_region(graph, {picking.node for picking in pickings}, form.num_tokens)
    moving = [each for each in pickings if region.layouts.get(each.rows) == Rows(each.axis)]
    if len(moving) < len(pickings):
        return _move(graph, form, values, moving) if moving else 0
    if not any(not is_moving(node) for node in region.layouts):
        return 0
    fewer = GatheredRegion(form, region, pickings[0].at)
    sources = {picking.rows: picking.axis for picking in pickings}
    if not fewer.fits() or not agrees(fewer, sources, values):
        logger.info("rows are picked where the model picks them: picked earlier, the same operations gave a different result")
        return 0
    fewer.apply()
    for picking in pickings:
        picking.node.replace_all_uses_with(picking.rows)
        graph.erase_node(picking.node)
    return len(region.layouts)
