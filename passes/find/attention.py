"""All finders of attention, in order."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from paged_attn.attn_ops.ops.module import MODULE_ON_ALL_TOKENS
from paged_attn.passes.find.attention_site import AttentionSite, ModuleScores
from paged_attn.passes.find.sdpa import find_sdpa
from paged_attn.passes.find.softmax import find_softmax
from paged_attn.passes.fx.call_form import CallForm


def find_modules_on_all_tokens(graph: fx.Graph, form: CallForm) -> list[AttentionSite]:
    """Modules that the trace left whole because they mix tokens in no known way: one op each (`attn_ops/ops/module.py`).

    The query, key and value of each are its hidden states.
    """
    sites = []
    for node in graph.nodes:
        if node.target is MODULE_ON_ALL_TOKENS:
            inputs, like = node.args[:2]
            hidden = inputs[like]
            sites.append(AttentionSite(node, hidden, hidden, hidden, ModuleScores(), "a module that mixes tokens", node.name))
    return sites


# find_softmax goes first: it changes the graph around what it finds.
FINDERS: tuple[Callable[[fx.Graph, CallForm], list[AttentionSite]], ...] = (find_softmax, find_sdpa, find_modules_on_all_tokens)


def find_attention(graph: fx.Graph, form: CallForm) -> list[AttentionSite]:
    """Every attention of a graph in execution order, each found once.

    Raises:
        UnsupportedError: an attention that is not of a known form, by name.
    """
    return sorted((site for finder in FINDERS for site in finder(graph, form)), key=lambda site: site.node)
