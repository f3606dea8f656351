"""How a tensor follows from a state, and the recurrence that is made of such tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from paged_attn.recurrent.inline.find.dims import ROWS, Dims
from paged_attn.recurrent.inline.find.factors import Factor

Product = tuple[Factor, ...]


@dataclass(frozen=True)
class Linear:
    """A node that is decay * S + the sum of `added` + the sum of `returned`, each of which is a product times what was read of S.

    Attributes:
        dims: the axes of the state in its dimensions; all of them, if it has S itself.
        decay: None if it has no S itself, but only what was read of it.
        returned: products, each with the node that read S: a sum over some of its axes.
    """

    dims: Dims
    decay: Product | None = ()
    added: tuple[Product, ...] = ()
    returned: tuple[tuple[Product, fx.Node], ...] = ()

    def times(self, factor: Factor) -> Linear:
        return replace(
            self, decay=None if self.decay is None else (*self.decay, factor), added=tuple((*each, factor) for each in self.added),
            returned=tuple(((*each, factor), node) for each, node in self.returned),
        )  # fmt: skip

    def plus(self, other: Linear) -> Linear:
        """The sum; at most one of the two has S itself."""
        decay = other.decay if self.decay is None else self.decay
        return Linear(self.dims, decay, (*self.added, *other.added), (*self.returned, *other.returned))


@dataclass(frozen=True)
class Read:
    """A node with what an op reads of the state, plus `more`, products that are summed over the same axes; what is left of the state's axes
    is in `dims`."""

    node: fx.Node
    dims: Dims
    more: tuple[Product, ...] = ()


@dataclass(frozen=True)
class Recurrence:
    """S' = the product of `decay`, times S, plus the product of `added`; `reads` are the product of `query` times S' (or S, if `before`),
    summed over `summed`. No factor depends on S.

    Attributes:
        state: its placeholder.
        axes: the size of each of its axes, and of the rows; an axis may be a part of a dimension.
        shape: the sizes of all its axes, also those of one.
        share: None, or what is added is this share of the difference between the value and what the key returns of the decayed state.
    """

    state: fx.Node
    axes: Mapping[int, int]
    shape: tuple[int, ...]
    decay: Sequence[Factor]
    added: Sequence[Factor]
    query: Sequence[Factor]
    summed: frozenset[int]
    before: bool
    reads: Sequence[Read]
    share: Sequence[Factor] | None = None

    @cached_property
    def heads(self) -> list[int]:
        """The axes along which keys, queries or decays differ; all, if the state is read as it is."""
        more = [factor for read in self.reads for product in read.more for factor in product if factor.axes & self.summed]
        differing = (*self.of_keys, *more, *self.decay, *self.query, *(self.share or ()))
        apart = {axis for factor in differing for axis in factor.axes} if self.summed else self.axes
        return [axis for axis in sorted(self.axes) if axis in apart and axis not in self.summed and axis != ROWS]

    @cached_property
    def of_keys(self) -> list[Factor]:
        """What is added, in part the keys; `of_values`: the rest."""
        return [factor for factor in self.added if factor.axes & self.summed]

    @cached_property
    def of_values(self) -> list[Factor]:
        return [factor for factor in self.added if not factor.axes & self.summed]

    @cached_property
    def decays_by_channel(self) -> bool:
        """Whether a decay differs along the keys."""
        return any(factor.axes & self.summed for factor in self.decay)

    @cached_property
    def keys(self) -> list[int]:
        return sorted(self.summed)

    @cached_property
    def values(self) -> list[int]:
        return [axis for axis in sorted(self.axes) if axis not in (ROWS, *self.heads, *self.keys)]
