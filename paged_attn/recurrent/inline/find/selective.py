"""Mamba-1's scan: S = exp(dt a) S + dt x B, read by C: each channel has time steps dt, and keys B and queries C are those of all channels.

As linear attention, each channel would be a head, and a token would need scores of its own for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from paged_attn.recurrent.inline.find.corrections import without
from paged_attn.recurrent.inline.find.dims import ROWS, viewed
from paged_attn.recurrent.inline.find.factors import Factor, constant, factors_of, without_constants
from paged_attn.recurrent.inline.find.forms import Product, Recurrence

aten = torch.ops.aten


@dataclass(frozen=True)
class Selective:
    """`steps` are dt [rows, channels], `rates` are a [channels, keys], without rows; `x`: what is added besides B, divided by dt, or, if
    not `divided`, still to be divided; `more`: what the output is multiplied with."""

    steps: Product
    rates: Product
    x: Product
    divided: bool
    more: Product


def selective_of(found: Recurrence) -> Selective | None:
    """None if it is another recurrence."""
    if not found.summed or found.share is not None or found.before or found.values or len(without_constants(found.decay)) != 1:
        return None
    shared = {ROWS, *found.keys}
    of_queries = tuple(each for each in found.query if each.axes & found.summed)
    if constant(found.decay) != 1 or any(not each.axes <= shared for each in (*found.of_keys, *of_queries)):
        return None
    (decay,) = without_constants(found.decay)
    if (exponent := _exponent(decay)) is None:
        return None
    factors = tuple(factors_of(exponent, found.axes))
    steps = tuple(each for each in factors if ROWS in each.axes)
    rates = without(factors, steps)
    if not steps or not rates or any(each.axes & found.summed for each in steps):
        return None
    x = without(tuple(found.of_values), steps)
    more = without(tuple(found.query), of_queries)
    assert more is not None
    return Selective(steps, rates, tuple(found.of_values) if x is None else x, x is not None, more)


def _exponent(factor: Factor) -> Factor | None:
    """y of exp(y)."""
    node = factor.node
    while isinstance(node, fx.Node) and node.target is aten._to_copy.default:
        node = viewed(node)  # type: ignore[assignment]
    return Factor(node.args[0], factor.dims) if isinstance(node, fx.Node) and node.target is aten.exp.default else None  # type: ignore[arg-type]
