"""All finders of attention, in order."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from paged_attn.passes.find.attention_site import AttentionSite
from paged_attn.passes.find.module_on_all_tokens import find_modules_on_all_tokens
from paged_attn.passes.find.sdpa import find_sdpa
from paged_attn.passes.find.softmax import find_softmax
from paged_attn.passes.fx.call_form import CallForm

# find_softmax goes first: it changes the graph around what it finds.
FINDERS: tuple[Callable[[fx.Graph, CallForm], list[AttentionSite]], ...] = (find_softmax, find_sdpa, find_modules_on_all_tokens)


def find_attention(graph: fx.Graph, form: CallForm) -> list[AttentionSite]:
    """Every attention of a graph in execution order, each found once.

    Raises:
        UnsupportedError: an attention that is not of a known form, by name.
    """
    return sorted((site for finder in FINDERS for site in finder(graph, form)), key=lambda site: site.node)
