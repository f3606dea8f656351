"""All finders of attention, in order. The walking matcher for decomposed softmax attention joins this tuple."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.attention_site import AttentionSite, module_path
from paged_attn.passes.call_form import CallForm
from paged_attn.passes.find_sdpa import find_sdpa
from paged_attn.passes.graph_tools import shape_of, symbol

FINDERS: tuple[Callable[[fx.Graph, CallForm], list[AttentionSite]], ...] = (find_sdpa,)
_SOFTMAX = {F.softmax, torch.softmax, torch._C._nn.softmax if hasattr(torch._C._nn, "softmax") else F.softmax}


def find_attention(graph: fx.Graph, form: CallForm) -> list[AttentionSite]:
    """Every attention of a graph in execution order, each found once.

    Raises:
        UnsupportedError: an attention that no finder takes, by name.
    """
    sites = [site for finder in FINDERS for site in finder(graph, form)]
    taken = {site.node for site in sites}
    missed = [node for node in graph.nodes if node not in taken and _looks_like_attention(node, form)]
    if missed:
        names = ", ".join(dict.fromkeys(module_path(node) or node.name for node in missed))
        raise UnsupportedError(
            f"attention that is written out as a softmax, without F.scaled_dot_product_attention, in {names}: not recognised yet. "
            "If the model offers it, load it with attn_implementation='sdpa'."
        )
    order = {node: index for index, node in enumerate(graph.nodes)}
    return sorted(sites, key=lambda site: order[site.node])


def _looks_like_attention(node: fx.Node, form: CallForm) -> bool:
    """A softmax whose result is [.., T, T] (or wider by a sink): scores of tokens against tokens. Routers' are [T, experts]."""
    is_softmax = (node.op == "call_function" and node.target in _SOFTMAX) or (node.op == "call_method" and node.target == "softmax")
    if node.op == "call_function" and "flex_attention" in getattr(node.target, "__name__", ""):
        return True
    if not is_softmax or isinstance(form.num_tokens, int):
        return False
    shape = shape_of(node)
    tokens = form.num_tokens
    wide = symbol(shape[-1])
    return len(shape) >= 2 and symbol(shape[-2]) == tokens and not isinstance(wide, int) and tokens in wide.free_symbols
