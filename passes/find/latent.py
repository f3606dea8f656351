"""Find the one narrow row per token that the keys and values of an attention are made of.

Before: kv = linear(latent [1, T, rank], weight) [1, T, rows], cut into keys and values by heads; a part [1, T, r] that all heads share joins
        the keys. In whatever way heads are cut, put together, copied and laid out; keys and values may come from two products.
After:  the same graph, and which nodes these are. That they are that is for `passes.prove.latent` to show on numbers.
Declines: keys or values that something computes on after the products; several rows besides the latent; a row that is not narrow.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from paged_attn.passes.find.attention_site import AttentionSite
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import is_view, shape_of, symbol, token_dims, value_of, writes_in_place
from paged_attn.passes.fx.token_data import name_of, read_inputs, writers_of
from paged_attn.passes.optimize.linears.sites import Linear, linear_of

NARROW = 2  # a row is kept if keys and values together are more than so many times as wide
_PUT_TOGETHER = {"cat", "concat", "concatenate", "stack", "copy_", "setitem", "clone", "repeat", "repeat_interleave", "new_empty",
                 "empty", "empty_like", "new_zeros"}  # fmt: skip
_OTHER_SHAPE = {"view", "reshape", "unsqueeze", "squeeze", "contiguous"}


@dataclass(frozen=True)
class LatentSite:
    """What an attention's keys and values seem to be made of.

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


def find_latent(site: AttentionSite, form: CallForm) -> LatentSite | str:
    """The row of one attention; or why it has none that can be kept: "" for what does not look like it."""
    made_of, _ = _sources(site.value, site.node, form)
    product = linear_of(made_of[0], form) if len(made_of) == 1 else None
    if product is None:
        return ""
    latent = _as_shaped_first(product.input)
    rank = int(shape_of(product.input)[-1])
    if NARROW * rank >= int(shape_of(product.node)[-1]) or _row_width(latent, form) != rank:
        return ""
    made_of, between = _sources(site.key, site.node, form)
    linears = [each for node in made_of if (each := linear_of(node, form)) is not None and _as_shaped_first(each.input) is latent]
    others = [node for node in made_of if all(node is not each.node for each in linears)]
    if not linears:
        return f"its keys are not made of the {rank} values that its values are made of"
    products = tuple(dict.fromkeys([product, *linears]))
    if any(each.bias is not None for each in products):
        return "its keys or values have a bias"
    if len(others) > 1:
        return f"its keys are made of {len(others)} more values: {', '.join(node.name for node in others)}"
    rotated = _narrowest(others[0], between, form) if others else None
    if others and rotated is None:
        return f"the part of its keys that is made of {others[0].name} is no one row per token"
    found = LatentSite(latent, rotated, products)
    both = int(shape_of(site.key)[1]) * int(shape_of(site.key)[3]) + int(shape_of(site.value)[1]) * int(shape_of(site.value)[3])
    if NARROW * (rank + found.num_rotated) >= both:
        return f"its row of {rank} + {found.num_rotated} values is not narrow beside its keys and values of {both}"
    return found


def _sources(node: fx.Node, user: fx.Node, form: CallForm) -> tuple[list[fx.Node], set[fx.Node]]:
    """What a value is made of, where nothing but layout lies between, in graph order; and the nodes on the way."""
    writers = writers_of(node.graph)
    found, seen, pending = set[fx.Node](), set[fx.Node](), [node]
    while pending:
        each = pending.pop()
        if each in seen:
            continue
        seen.add(each)
        if not isinstance(value_of(each), (Tensor, tuple, list)):
            continue
        moves = (is_view(each) or name_of(each) in _PUT_TOGETHER) and linear_of(each, form) is None
        if each.op == "placeholder" or not moves:
            found.add(each)
            continue
        pending += read_inputs(each)
        pending += [writer for writer in writers.get(each, ()) if writer < user]
    return sorted(found), seen


def _narrowest(node: fx.Node, between: set[fx.Node], form: CallForm) -> fx.Node | None:
    """The last form of a value, on its way to the keys, in which it is one row per token of the fewest values."""
    best: tuple[int, fx.Node] | None = None
    while True:
        width = _row_width(node, form)
        if width is not None and (best is None or width <= best[0]):
            best = width, node
        users = [user for user in node.users if user in between]
        if len(users) != 1 or not is_view(users[0]) or writes_in_place(users[0]):
            return None if best is None else best[1]
        (node,) = users


def _row_width(node: fx.Node, form: CallForm) -> int | None:
    """Of floating [.., T, width], other dims 1; None for anything else."""
    value = value_of(node)
    if not isinstance(value, Tensor) or not value.is_floating_point() or token_dims(node, form.num_tokens) != 1:
        return None
    sizes = [symbol(size) for size in value.shape]
    fits = sizes[-1] != form.num_tokens and sizes.count(form.num_tokens) == 1 and all(size in (1, form.num_tokens) for size in sizes[:-1])
    return int(sizes[-1]) if fits and isinstance(sizes[-1], int) else None


def _as_shaped_first(node: fx.Node) -> fx.Node:
    """Without the views that only add or drop dims of 1."""
    while node.op == "call_method" and node.target in _OTHER_SHAPE and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        if not isinstance(value_of(source), Tensor) or symbol(shape_of(source)[-1]) != symbol(shape_of(node)[-1]):
            break
        node = source
    return node
