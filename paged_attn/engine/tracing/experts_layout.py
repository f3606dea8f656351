"""Where a module of experts has its weights.

transformers' modules say so by flags (`is_transposed`, `has_bias`, ...). Others, as remote code has them, may be experts if they hold two
stacked weights whose shapes fit each other, or matrices of all experts' rows (`flat_layout.py`), and are called with hidden states, ids
and weights. What either computes is then proved.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from paged_attn.engine.tracing.flat_layout import DTYPES, FlatLayout, Operands, flat_layouts

FLAGS = ("has_gate", "has_bias", "is_transposed")
OTHER_KINDS = ("has_post_expert_norm",)  # newer than transformers 5.17


class Layout(NamedTuple):
    """Which of a module's parameters are the weights of both products and their biases, and how they lie.

    Attributes:
        transposed: [E, H, n] and [E, I, H] in place of [E, n, H] and [E, H, I].
        experts: whole ones: a weight may have more rows, for ids that mean something else.
    """

    first: str
    second: str
    biases: tuple[str, str] | None
    transposed: bool
    experts: int

    def operands(self, module: nn.Module) -> Operands:
        """w1 [E, n, H] and w2 [E, H, I] as views of the module's weights, and their biases [E, n] and [E, H]."""
        w1, w2 = (getattr(module, name)[: self.experts] for name in (self.first, self.second))
        if self.transposed:
            w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
        if self.biases is None:
            return w1, w2, None, None
        b1, b2 = (getattr(module, name)[: self.experts] for name in self.biases)
        return w1, w2, b1, b2

    def num_ids(self, module: nn.Module) -> int:
        """How many ids the weights have rows for."""
        return max(len(getattr(module, self.first)), len(getattr(module, self.second)))

    def moved(self, module: nn.Module) -> list[Any]:
        """None of them need be moved."""
        return []


def layouts_of(module: nn.Module) -> Sequence[Layout | FlatLayout]:
    """Those that the module may have, by flags or by shapes; none if it is no module of experts, or has no plain tensors."""
    if any(getattr(module, kind, False) for kind in OTHER_KINDS):
        return []
    if all(hasattr(module, flag) for flag in FLAGS):
        return _by_flags(module)
    return (_by_shapes(module) or flat_layouts(module)) if _num_arguments(module) == 3 else []


def _by_flags(module: Any) -> list[Layout]:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    if not all(is_stacked(getattr(module, name, None)) for name in (first, "down_proj")):
        return []
    biases = (f"{first}_bias", "down_proj_bias") if module.has_bias else None
    return [Layout(first, "down_proj", biases, bool(module.is_transposed), len(module.down_proj))]


def _by_shapes(module: nn.Module) -> list[Layout]:
    own = dict(module.named_parameters(recurse=False))
    stacked = [name for name, weight in own.items() if is_stacked(weight)]
    biases = [name for name, weight in own.items() if weight.dim() == 2]
    if len(stacked) != 2 or len(biases) not in (0, 2) or len(own) != 2 + len(biases):
        return []
    found = []
    for first, second in (stacked, stacked[::-1]):
        experts = min(len(own[first]), len(own[second]))
        for transposed in (False, True):
            hidden, inner = (own[second].shape[axis] for axis in ((2, 1) if transposed else (1, 2)))
            wide, given = (own[first].shape[axis] for axis in ((2, 1) if transposed else (1, 2)))
            if given != hidden or wide not in (inner, 2 * inner):
                continue
            named = [name for size in (wide, hidden) for name in biases if own[name].shape[1] == size]
            if not biases or len(set(named)) == 2:
                found.append(Layout(first, second, (named[0], named[-1]) if biases else None, transposed, experts))
    return found


def is_stacked(weight: Any) -> bool:
    """Whether it is a dense parameter with a matrix for each expert, in a type that backends compute in."""
    return type(weight) is nn.Parameter and weight.dim() == 3 and weight.is_floating_point() and weight.dtype in DTYPES


def _num_arguments(module: nn.Module) -> int:
    return len(inspect.signature(module.forward).parameters)
