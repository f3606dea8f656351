"""All finders of attention, in order."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from paged_attn.attn_ops.ops.module import MODULE_ON_ALL_TOKENS
from paged_attn.passes.find.attention_site import AttentionSite, ModuleScores
from paged_attn.passes.find.sdpa import find_sdpa
from paged_attn.passes.find.softmax import find_softmax
from paged_attn.passes.find.spellings.own_buffers import take_written_values
from paged_attn.passes.fx.call_form import CallForm


def find_modules_on_all_tokens(graph: fx.Graph, form: CallForm) -> list[AttentionSite]:
    """Modules that the trace left whole because they mix tokens in an unknown way: one op each (`attn_ops/ops/module.py`).

    Query, key and value of such a site are all the module's hidden states.
    """
    sites = []
    for node in graph.nodes:
        if node.target is MODULE_ON_ALL_TOKENS:
            inputs, like = node.args[:2]
            hidden = inputs[like]
            sites.append(AttentionSite(node, hidden, hidden, hidden, ModuleScores(), "a module that mixes tokens", node.name))
    return sites


# find_softmax goes first because it changes the graph around the attentions it finds.
FINDERS: tuple[Callable[[fx.Graph, CallForm], list[AttentionSite]], ...] = (find_softmax, find_sdpa, find_modules_on_all_tokens)


def find_attention(graph: fx.Graph, form: CallForm) -> list[AttentionSite]:
    """Every attention of a graph in execution order, each found once.

    Raises:
        UnsupportedError: an attention of unknown form; the message names it.
    """
    if not form.reason:
        take_written_values(graph, form)
    return sorted((site for finder in FINDERS for site in finder(graph, form)), key=lambda site: site.node)
