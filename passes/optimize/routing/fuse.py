"""The operations between a router's logits and its experts become `paged_attn::route`.

Before: softmax, topk, gather, sum, div, ... of logits [T, E]
After:  weights, ids = paged_attn.route(logits, bias, ...)
Left alone: what is made from more than logits and a bias, and what no `Routing` gives the numbers of.
"""

from __future__ import annotations

import logging
import operator
from typing import Any

from torch import fx

from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.ops.routing import ROUTE
from paged_attn.attn_ops.specs.routing import Routing
from paged_attn.passes.fx.graph_tools import call_with_value, remove_dead_code, value_of
from paged_attn.passes.optimize.routing.proof import proved_routing
from paged_attn.passes.optimize.routing.region import region_of

logger = logging.getLogger("paged_attn")


def fuse_routing(graph: fx.Graph, values: dict[fx.Node, Any]) -> int:
    """Rewrite in place; returns how many routers are one op now.

    `values`: the real tensors behind the graph's inputs.
    """
    known: list[Routing] = []
    count = 0
    for experts in [node for node in graph.nodes if node.target is EXPERTS]:
        region = region_of(experts, dict.fromkeys(values.keys()))
        routing = None if region is None else proved_routing(region, known)
        if region is None or routing is None:
            continue
        if routing not in known:
            known.append(routing)
            logger.info("routing is one op: %s", routing.describe())
        with graph.inserting_before(region.nodes[0]):
            both = call_with_value(
                graph, ROUTE, region.logits, region.bias, value_of(region.weights).dtype, routing.top_k, routing.score, routing.after,
                routing.groups, routing.top_groups, routing.group_best, routing.hidden, routing.renormalise, routing.eps, routing.scale,
                routing.rounded,
            )  # fmt: skip
            weights = call_with_value(graph, operator.getitem, both, 0)
            ids = call_with_value(graph, operator.getitem, both, 1)
        region.reader.replace_input_with(region.ids, ids)
        experts.args = (*experts.args[:2], weights, *experts.args[3:])
        count += 1
    if count:
        remove_dead_code(graph)
    return count
