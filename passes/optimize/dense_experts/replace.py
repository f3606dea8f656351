"""Experts that all compute every token become `paged_attn::experts`.

Before: each token, times each expert's score of it, which is zero but for k of them, through bmm, a gate and bmm; summed over all experts
After:  paged_attn.experts(the token times its score, ids of the chosen, ones, ...), and for k above 1 a sum over the k
Left alone: whatever else the numbers show. How the k are chosen stays as it is.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.specs.experts import ExpertsSpec, Gating
from paged_attn.passes.fx.graph_tools import call_with_value, remove_dead_code, shape_of, value_of
from paged_attn.passes.fx.read_values import ReadValues
from paged_attn.passes.optimize.dense_experts.proof import proved_gating
from paged_attn.passes.optimize.dense_experts.region import DenseExperts, regions_of

logger = logging.getLogger("paged_attn")
ChooseExperts = Callable[[ExpertsSpec, Tensor], str]  # the name of a backend for a layer, and for weights like these


def replace_dense_experts(graph: fx.Graph, values: ReadValues, choose: ChooseExperts) -> int:
    """Rewrite in place; returns how many layers are one op now.

    `values`: the tensors behind the graph's inputs; none of their numbers is read.
    """
    count = 0
    for region in regions_of(graph, values.keys()):
        gating = proved_gating(region)
        if gating is not None:
            _replace(graph, region, gating, choose)
            count += 1
    if count:
        logger.info("%d layers of experts that computed every token compute those that chose them", count)
        remove_dead_code(graph)
    return count


def _replace(graph: fx.Graph, region: DenseExperts, gating: Gating, choose: ChooseExperts) -> None:
    experts, hidden, _ = shape_of(region.w1)
    spec = ExpertsSpec(experts, hidden, shape_of(region.w2)[1], gating)
    top_k = shape_of(region.ids)[1]
    with graph.inserting_before(region.total):
        scores = call_with_value(graph, "gather", region.scores, 1, region.ids)
        rows, ids = region.x, region.ids
        if top_k > 1:
            rows = call_with_value(graph, "unsqueeze", rows, 1)
            scores = call_with_value(graph, "unsqueeze", scores, 2)
            ids = call_with_value(graph, "reshape", ids, -1, 1)
        rows = call_with_value(graph, operator.mul, rows, scores)
        if top_k > 1:
            rows = call_with_value(graph, "reshape", rows, -1, hidden)
        ones = call_with_value(graph, torch.ones_like, ids, dtype=value_of(rows).dtype)
        w1, w2 = (call_with_value(graph, "transpose", weight, 1, 2) for weight in (region.w1, region.w2))
        backend = choose(spec, value_of(region.w1))
        result = call_with_value(graph, EXPERTS, rows, ids, ones, w1, w2, None, None, *gating.arguments, backend)
        if top_k > 1:
            result = call_with_value(graph, "reshape", result, -1, top_k, hidden)
            result = call_with_value(graph, "sum", result, 1)
    region.total.replace_all_uses_with(result)
