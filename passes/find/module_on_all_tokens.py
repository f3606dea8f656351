"""Modules that the trace left whole because they mix tokens in no known way: one op each (`attn_ops/ops/module.py`)."""

from __future__ import annotations

from torch import fx

from paged_attn.attn_ops.ops.module import MODULE_ON_ALL_TOKENS
from paged_attn.passes.find.attention_site import AttentionSite, ModuleScores
from paged_attn.passes.fx.call_form import CallForm

FOUND_BY = "a module that mixes tokens"


def find_modules_on_all_tokens(graph: fx.Graph, form: CallForm) -> list[AttentionSite]:
    """In execution order; the query, key and value of each are its hidden states."""
    sites = []
    for node in graph.nodes:
        if node.target is MODULE_ON_ALL_TOKENS:
            inputs, like = node.args[:2]
            hidden = inputs[like]
            sites.append(AttentionSite(node, hidden, hidden, hidden, ModuleScores(), FOUND_BY, node.name))
    return sites
