"""Finds the one narrow row per token from which the keys and values of an attention are computed.

Before: kv = linear(latent [1, T, rank], weight) [1, T, rows], cut into keys and values by heads; a part [1, T, r] that all heads share
        joins the keys. Heads may be cut, joined, copied and laid out in any way; keys and values may come from two products.
After:  the same graph, and which nodes these are. `passes.prove.latent` proves on numbers that they are what they seem.
Declines: keys or values on which something computes after the products; several rows besides the latent; a row that is not narrow.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from paged_attn.passes.find.attention_site import AttentionSite
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import is_view, name_of, shape_of, sizes_of, symbol, value_of, writers_of
from paged_attn.passes.fx.token_data import read_inputs, token_axis
from paged_attn.passes.optimize.linears.sites import Linear, linear_of

NARROW = 2  # a row is kept only if keys and values together are more than this many times as wide
_PUT_TOGETHER = {"cat", "concat", "concatenate", "stack", "copy_", "setitem", "clone", "repeat", "repeat_interleave", "new_empty",
                 "empty", "empty_like", "new_zeros"}  # fmt: skip
_OTHER_SHAPE = {"view", "reshape", "unsqueeze", "squeeze", "contiguous"}


@dataclass(frozen=True)
class LatentSite:
    """The nodes from which an attention's keys and values seem to be made.

    Attributes:
        latent: [.., T, rank], other dims 1.
        rotated: [.., T, r] in any layout with one other dim, or None.
        products: linears of the latent.
    """

    latent: fx.Node
    rotated: fx.Node | None
    products: tuple[Linear, ...]

    @property
    def rank(self) -> int:
        return int(shape_of(self.latent)[-1])

    @property
    def num_rotated(self) -> int:
        return 0 if self.rotated is None else int(shape_of(self.rotated)[-1])


class LatentFinder:
    """Finds the latent rows of a graph's attentions. Create a new finder after changing the graph."""

    def __init__(self, graph: fx.Graph, form: CallForm) -> None:
        self.form, self.writers = form, writers_of(graph.nodes)

    def find(self, site: AttentionSite) -> LatentSite | str:
        """The latent of one attention, or the reason why none can be kept: "" if the attention does not look latent at all."""
        form = self.form
        made_of, _ = self._sources(site.value, site.node)
        product = linear_of(next(iter(made_of)), form) if len(made_of) == 1 else None
        if product is None:
            return ""
        latent = _as_shaped_first(product.input)
        rank = int(shape_of(product.input)[-1])
        width = int(shape_of(product.node)[-1]) * (1 + int(shape_of(site.key)[3]) / int(shape_of(site.value)[3]))
        if NARROW * rank >= width or self._row_width(latent) != rank:
            return ""
        made_of, between = self._sources(site.key, site.node)
        linears = [each for node in made_of if (each := linear_of(node, form)) is not None and _as_shaped_first(each.input) is latent]
        if not linears:
            return f"its keys are not made of the {rank} values that its values are made of"
        products = tuple(dict.fromkeys([product, *linears]))
        if any(each.bias is not None for each in products):
            return "its keys or values have a bias"
        others = made_of - {each.node for each in linears}
        rotated = self._shared_row(site, made_of - others, between) if others else None
        if others and rotated is None:
            return f"the part of its keys that is made of {', '.join(node.name for node in sorted(others))} is not one row per token"
        found = LatentSite(latent, rotated, products)
        both = sum(int(shape_of(each)[1]) * int(shape_of(each)[3]) for each in (site.key, site.value))
        if NARROW * (rank + found.num_rotated) >= both:
            return f"its row of {rank} + {found.num_rotated} values is not narrow compared with its keys and values of {both}"
        return found

    def _sources(self, node: fx.Node, user: fx.Node, stop: fx.Node | None = None) -> tuple[set[fx.Node], set[fx.Node]]:
        """The values that a node only rearranges, and the nodes in between; `stop` counts as such a value."""
        found, seen, pending = set[fx.Node](), set[fx.Node](), [node]
        while pending:
            each = pending.pop()
            if each in seen or not isinstance(value_of(each), (Tensor, tuple, list)):
                continue
            seen.add(each)
            moves = (is_view(each) or name_of(each) in _PUT_TOGETHER) and linear_of(each, self.form) is None
            if each.op == "placeholder" or not moves or each is stop:
                found.add(each)
                continue
            pending += read_inputs(each)
            for writer in self.writers.get(each, ()):
                if writer < user and name_of(writer) in _PUT_TOGETHER:
                    pending += read_inputs(writer)
                elif writer < user:
                    found.add(writer)
        return found, seen

    def _shared_row(self, site: AttentionSite, products: set[fx.Node], between: set[fx.Node]) -> fx.Node | None:
        """The narrowest value with one row per token that, together with the products, makes up the keys; the last one if several are."""
        best: tuple[int, fx.Node] | None = None
        for node in sorted(between - products, reverse=True):
            width = self._row_width(node)
            if width is None or (best is not None and width >= best[0]):
                continue
            if self._sources(site.key, site.node, node)[0] == products | {node}:
                best = width, node
        return None if best is None else best[1]

    def _row_width(self, node: fx.Node) -> int | None:
        """The width of floating rows [.., T, width], other dims 1; None for anything else."""
        axis = token_axis(node, self.form)
        if axis is None or not value_of(node).is_floating_point():
            return None
        *others, width = sizes_of(node)
        return width if isinstance(width, int) and all(size == 1 for i, size in enumerate(others) if i != axis) else None


def _as_shaped_first(node: fx.Node) -> fx.Node:
    """Skips views that only add or drop dims of size 1."""
    while node.op == "call_method" and node.target in _OTHER_SHAPE and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        if not isinstance(value_of(source), Tensor) or symbol(shape_of(source)[-1]) != symbol(shape_of(node)[-1]):
            break
        node = source
    return node
