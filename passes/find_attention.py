"""All finders of attention, in order."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.attention_site import AttentionSite, module_path
from paged_attn.passes.call_form import CallForm
from paged_attn.passes.find_sdpa import find_sdpa
from paged_attn.passes.find_softmax import find_softmax

# find_softmax goes first: it changes the graph around what it finds.
FINDERS: tuple[Callable[[fx.Graph, CallForm], list[AttentionSite]], ...] = (find_softmax, find_sdpa)


def find_attention(graph: fx.Graph, form: CallForm) -> list[AttentionSite]:
    """Every attention of a graph in execution order, each found once.

    Raises:
        UnsupportedError: an attention that no finder takes, by name.
    """
    sites = [site for finder in FINDERS for site in finder(graph, form)]
    missed = [node for node in graph.nodes if node.op == "call_function" and "flex_attention" in getattr(node.target, "__name__", "")]
    if missed:
        names = ", ".join(dict.fromkeys(module_path(node) or node.name for node in missed))
        raise UnsupportedError(
            f"attention by flex_attention in {names}: not recognised yet. Load the model with attn_implementation='sdpa'."
        )
    order = {node: index for index, node in enumerate(graph.nodes)}
    return sorted(sites, key=lambda site: order[site.node])
