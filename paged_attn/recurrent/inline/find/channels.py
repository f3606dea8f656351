"""States of single numbers that are read in any way: a scan returns what each was before its token, and all else stays as it is written.

S' is S times something plus something, or the maximum of S plus something and something else: the running maximum that RWKV-4 and xLSTM
subtract from exponents, and the sums of exponentials themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from paged_attn.recurrent.inline.find.dims import ROWS, Dims, before_view, viewed
from paged_attn.recurrent.inline.find.factors import operand
from paged_attn.recurrent.inline.find.forms import Product, Read
from paged_attn.recurrent.inline.find.linear import Finder, depending_on, followed
from paged_attn.recurrent.inline.step_graph import StepGraph
from paged_attn.recurrent.program import NoOpFits

aten = torch.ops.aten
WIDEST = 16  # numbers of a state, times a token's own width: each token has as many decays, addends and states


@dataclass(frozen=True)
class ChannelScan:
    """S' = `decay` S + `x`, or with `maximum` the maximum of S + `decay` and `x`; both are sums of products, none of which depends on S.

    Attributes:
        axes, shape: as of `forms.Recurrence`.
        reads: the state itself.
    """

    axes: dict[int, int]
    shape: tuple[int, ...]
    decay: Sequence[Product]
    x: Sequence[Product]
    maximum: bool
    reads: Sequence[Read]

    @property
    def channels(self) -> list[int]:
        return [axis for axis in sorted(self.axes) if axis != ROWS]


def channel_scan_of(step: StepGraph, index: int) -> ChannelScan:
    """The scan that a state is.

    Raises:
        NoOpFits: it is none, or has too many numbers.
    """
    finder = followed(step, index)
    form = finder.nodes.get(finder.new)
    sums: tuple[Sequence[Product], Sequence[Product]] | None = None
    if form is not None and form.decay is not None and form.dims == finder.own and not form.returned:
        sums = [form.decay], form.added
    decay, x = ([finder.apart(product) for product in each] for each in sums or _maximum(finder))
    dependent = depending_on(step.graph, [finder.state])
    if any(factor.node in dependent for product in (*decay, *x) for factor in product):
        raise NoOpFits("what its state is multiplied with, or what is added, depends on the state")
    found = ChannelScan(finder.axes, finder.shape, decay, x, sums is None, [Read(finder.state, finder.own)])
    count = math.prod(found.axes[axis] for axis in found.channels)
    allowed = WIDEST * max(math.prod(node.meta["val"].shape[1:]) for node in step.inputs)
    if count > allowed:
        raise NoOpFits(f"for each token it would need {count:,} elements of its state; allowed are {allowed:,}")
    return found


def _maximum(finder: Finder) -> tuple[Sequence[Product], Sequence[Product]]:
    """What is added to the state, and what the sum is compared with."""
    for node, dims in _unviewed(finder):
        if node.target is not aten.maximum.default:
            continue
        for state, other in (node.args, node.args[::-1]):
            form: Any = finder.nodes.get(state)  # type: ignore[arg-type]
            if form is not None and form.decay == () and not form.returned and form.dims == dims and other is not state:
                return form.added, [(operand(other, dims),)]
    raise NoOpFits("its new state is neither a linear function of the state before nor a maximum")


def _unviewed(finder: Finder) -> Iterator[tuple[fx.Node, Dims]]:
    """The new state, and the nodes that it shows in other shapes."""
    node, dims = finder.new, finder.own
    while True:
        yield node, dims
        before = None if (shown := viewed(node)) is None else before_view(node, dims, finder.axes)
        if shown is None or before is None:
            return
        node, dims = shown, before
