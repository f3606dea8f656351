"""Finds the one narrow row per token from which the keys and values of an attention are computed.

Before: kv = linear(latent [1, T, rank], weight) [1, T, rows], cut into keys and values by heads; a part [1, T, r] that all heads share
        joins the keys. Heads may be cut, joined, copied, padded and laid out in any way; keys and values may come from two products, in any
        spelling. Or no product: one head of keys, part of which is also the value, as in models that map queries and outputs themselves.
After:  the same graph, and which nodes these are. `passes.prove.latent` proves on numbers that they are what they seem.
Declines: keys or values on which something computes after the products; several rows besides the latent; a row that is not narrow.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, fx

from paged_attn.passes.find.attention_site import AttentionSite
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import JOINS, name_of, shape_of, sizes_of, value_of
from paged_attn.passes.fx.memory import is_view, writers_of
from paged_attn.passes.fx.token_data import read_inputs, token_axis

NARROW = 2  # a row is kept only if keys and values together are more than this many times as wide
_PUT_TOGETHER = JOINS | {"stack", "copy_", "setitem", "clone", "repeat", "repeat_interleave", "new_empty", "pad",
                 "empty", "empty_like", "new_zeros", "zeros", "zeros_like"}  # fmt: skip
_PRODUCTS = {"linear", "matmul", "bmm", "mm", "addmm", "einsum"}
_OTHER_SHAPE = {
    "view", "reshape", "unsqueeze", "squeeze", "contiguous", "expand", "flatten", "unflatten", "transpose", "permute", "getitem",
}  # fmt: skip


class RowProduct(NamedTuple):
    """A product of rows with a weight of the model, maybe with a bias: the weight and bias are made of `owned` by moving numbers."""

    node: fx.Node
    input: fx.Node
    owned: tuple[fx.Node, ...]


@dataclass(frozen=True)
class LatentSite:
    """The nodes from which an attention's keys and values seem to be made.

    Attributes:
        latent: [.., T, rank], other dims 1.
        rotated: [.., T, r] in any layout with one other dim, or None.
        products: of the latent; none if keys and values are the latent itself.
    """

    latent: fx.Node
    rotated: fx.Node | None
    products: tuple[RowProduct, ...]

    @property
    def rank(self) -> int:
        return int(shape_of(self.latent)[-1])

    @property
    def num_rotated(self) -> int:
        return 0 if self.rotated is None else int(shape_of(self.rotated)[-1])

    @property
    def owned(self) -> tuple[fx.Node, ...]:
        """The weights and biases of the products, each once."""
        return tuple(dict.fromkeys(node for product in self.products for node in product.owned))


class LatentFinder:
    """Finds the latent rows of a graph's attentions. Create a new finder after changing the graph."""

    def __init__(self, graph: fx.Graph, form: CallForm) -> None:
        self.form, self.writers = form, writers_of(graph.nodes)

    def find(self, site: AttentionSite) -> LatentSite | str:
        """The latent of one attention, or the reason why none can be kept: "" if the attention does not look latent at all."""
        made_of, between = self._sources(site.value, site.node)
        if len(made_of) != 1:
            return self._several(site, made_of)
        (source,) = made_of
        product = self._product(source)
        if product is None:
            return self._shared_keys(site, between)
        latent = self._row_behind(product.input)
        if latent is None:
            return ""
        rank = int(shape_of(latent)[-1])
        width = self._numbers_per_token(product.node) * (1 + int(shape_of(site.key)[3]) / int(shape_of(site.value)[3]))
        if NARROW * rank >= width:
            return ""
        made_of, between = self._sources(site.key, site.node)
        products = [each for node in made_of if (each := self._product(node)) is not None and self._row_behind(each.input) is latent]
        if not products:
            return f"its keys are not made of the {rank} values that its values are made of"
        others = made_of - {each.node for each in products}
        rotated = self._shared_row(site, made_of - others, between) if others else None
        if others and rotated is None:
            return f"the part of its keys that is made of {', '.join(node.name for node in sorted(others))} is not one row per token"
        found = LatentSite(latent, rotated, tuple(dict.fromkeys([product, *products])))
        both = sum(int(shape_of(each)[1]) * int(shape_of(each)[3]) for each in (site.key, site.value))
        if NARROW * (rank + found.num_rotated) >= both:
            return f"its row of {rank} + {found.num_rotated} values is not narrow compared with its keys and values of {both}"
        return found

    def _several(self, site: AttentionSite, made_of: set[fx.Node]) -> str:
        products = [product for node in made_of if (product := self._product(node)) is not None]
        rows = {row for each in products if (row := self._row_behind(each.input)) is not None}
        ranks = [int(shape_of(row)[-1]) for row in rows]
        values = int(shape_of(site.value)[1]) * int(shape_of(site.value)[3])
        if len(products) == len(made_of) and len(rows) > 1 and NARROW * sum(ranks) < values:
            return f"its values are made of {len(rows)} rows of {' and '.join(map(str, sorted(ranks)))} values, not of one"
        return ""

    def _shared_keys(self, site: AttentionSite, between: set[fx.Node]) -> LatentSite | str:
        """One row is the value of all heads and also part of the key of all heads."""
        row = next((node for node in sorted(between) if self._row_width(node) == int(shape_of(site.value)[3])), None)
        if row is None or self._sources(site.value, site.node, {row})[0] != {row}:
            return ""
        made_of, between = self._sources(site.key, site.node, {row})
        rotated = self._shared_row(site, {row}, between) if row in made_of and len(made_of) > 1 else None
        return LatentSite(row, rotated, ()) if rotated is not None else ""

    def _product(self, node: fx.Node) -> RowProduct | None:
        """What a node multiplies with a weight of the model; None for any other node."""
        tensors = [each for each in read_inputs(node) if isinstance(value_of(each), Tensor)]
        if name_of(node) not in _PRODUCTS or len(tensors) not in (2, 3):
            return None
        owned, rows = list[fx.Node](), list[fx.Node]()
        for each in tensors:
            sources = self._sources(each, node)[0]
            is_owned = all(self.form.roles.get(source) == "owned" and value_of(source).is_floating_point() for source in sources)
            (owned if is_owned else rows).extend(sources if is_owned else [each])
        return RowProduct(node, rows[0], tuple(sorted(owned))) if len(rows) == 1 and owned else None

    def _row_behind(self, node: fx.Node) -> fx.Node | None:
        """The first row per token that a node shows in another shape; None if it does not show one row."""
        width, found = shape_of(node)[-1], None
        while True:
            found = node if self._row_width(node) == width else found
            source = node.args[0] if node.args else None
            if name_of(node) not in _OTHER_SHAPE or not isinstance(source, fx.Node) or not isinstance(value_of(source), Tensor):
                return found
            if name_of(node) == "getitem" and self._row_width(source) != width:
                return found
            node = source

    def _numbers_per_token(self, node: fx.Node) -> int:
        axis, count = token_axis(node, self.form), 1
        for i, size in enumerate(shape_of(node)):
            count *= 1 if i == axis else int(size)
        return count if axis is not None else 0

    def _sources(self, node: fx.Node, user: fx.Node, stop: Set[fx.Node] = frozenset()) -> tuple[set[fx.Node], set[fx.Node]]:
        """The values that a node only rearranges, and the nodes in between; those in `stop` count as such values."""
        found, seen, pending = set[fx.Node](), set[fx.Node](), [node]
        while pending:
            each = pending.pop()
            if each in seen or not isinstance(value_of(each), (Tensor, tuple, list)):
                continue
            seen.add(each)
            moves = is_view(each) or name_of(each) in _PUT_TOGETHER
            if each.op == "placeholder" or not moves or each in stop:
                found.add(each)
                continue
            pending += read_inputs(each)
            for writer in self.writers.get(each, ()):
                if writer < user and name_of(writer) in _PUT_TOGETHER:
                    pending += read_inputs(writer)
                elif writer < user:
                    found.add(writer)
        return found, seen

    def _shared_row(self, site: AttentionSite, others: set[fx.Node], between: set[fx.Node]) -> fx.Node | None:
        """The narrowest value with one row per token that, together with the others, makes up the keys; the last one if several are."""
        best: tuple[int, fx.Node] | None = None
        for node in sorted(between - others, reverse=True):
            width = self._row_width(node)
            if width is None or (best is not None and width >= best[0]):
                continue
            if self._sources(site.key, site.node, others | {node})[0] == others | {node}:
                best = width, node
        return None if best is None else best[1]

    def _row_width(self, node: fx.Node) -> int | None:
        """The width of floating rows [.., T, width], other dims 1; None for anything else."""
        axis = token_axis(node, self.form)
        if axis is None or not value_of(node).is_floating_point():
            return None
        *others, width = sizes_of(node)
        return width if isinstance(width, int) and all(size == 1 for i, size in enumerate(others) if i != axis) else None
