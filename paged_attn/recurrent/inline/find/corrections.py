"""Delta rules: what a state adds depends on what it returns for a key, S' = decay S + key^T share (value - key decay S)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from paged_attn.recurrent.inline.find.factors import Factor, constant, reduced, without_constants
from paged_attn.recurrent.inline.find.forms import Linear, Product
from paged_attn.recurrent.program import NoOpFits

Sums = Mapping[fx.Node, tuple[Linear, frozenset[int]]]


def corrected(new: Linear, sums: Sums, apart: Callable[[Product], Product]) -> tuple[Product, Product]:
    """What is added (keys and values), and the share of it that is learned.

    Args:
        new: the new state, with one product that is added, and `returned`.
        sums: what each node of these sums, and over which axes.
        apart: takes a product into its factors.

    Raises:
        NoOpFits: it is not the delta rule.
    """
    if len(new.returned) != 1 or len(new.added) != 1 or new.decay is None:
        raise NoOpFits("what its state returns is added to it in several ways")
    ((times, node),) = new.returned
    form, summed = sums[node]
    if form.added or form.returned or form.decay is None:
        raise NoOpFits("what is added to its state depends on what it returns after something was added")
    asked = without(apart(form.decay), apart(new.decay))
    if asked is None:
        raise NoOpFits("what is added to its state depends on what it returned before it decayed")
    times, added = apart(times), apart(new.added[0])
    keys, share = _keys_and_rest(times, summed)
    asking, rest = _keys_and_rest(asked, summed)
    if without(keys, asking) != () or without(asking, keys) != ():
        raise NoOpFits("what its state returns for one key is added to it at another")
    share = (*share, *rest)
    value = without(without_constants(added), (*keys, *share))
    if value is None:
        raise NoOpFits("of what its state returns it forgets another share than it learns")
    learned = -constant(times) * constant(asked)
    return reduced([*keys, *value, Factor(constant(added) / learned)]), reduced([*share, Factor(learned)])


def without(product: Product, part: Sequence[Factor]) -> Product | None:
    """The factors of `product` that are not in `part`, or None if one of those is missing."""
    left = list(product)
    for factor in part:
        if factor not in left:
            return None
        left.remove(factor)
    return tuple(left)


def _keys_and_rest(product: Product, summed: frozenset[int]) -> tuple[Product, Product]:
    tensors = without_constants(product)
    return tuple(each for each in tensors if each.axes & summed), tuple(each for each in tensors if not each.axes & summed)
