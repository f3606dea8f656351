"""Scores of each head with a factor of its own (a learned temperature): the factors go into the queries, as a spec has one scale.

Before: scores = q @ k^T * temperature [heads, 1, 1]
After:  q * (temperature / the largest temperature), and that one as the scale
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paged_attn.passes.find.attention_site import AttentionSite
from paged_attn.passes.fx.graph_tools import add_buffer, value_of

aten = torch.ops.aten


def with_scaled_query(site: AttentionSite, by_head: Sequence[float], layer_id: int, device: torch.device) -> AttentionSite:
    """The site with a query [1, heads, T, dim] that is multiplied so."""
    graph, like = site.node.graph, value_of(site.query)
    factors = torch.tensor(by_head, dtype=like.dtype, device=device)[:, None, None]
    with graph.inserting_before(site.node):
        by = add_buffer(graph, f"query_factors_{layer_id}", factors)
        query = graph.call_function(aten.mul.Tensor, (site.query, by))
    by.meta["example_value"] = factors
    query.meta |= {"example_value": like, "nn_module_stack": site.node.meta.get("nn_module_stack")}
    return replace(site, query=query)
