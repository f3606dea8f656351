"""Where a module of experts has its weights, if all experts' rows lie in matrices [E n, m]: its own, or those of a module within (DBRX).

Nothing in such a matrix says how many experts it holds: numbers of the module whose names speak of experts are tried, small ones first.
On a GPU ids beyond a module's experts may end the process; with fewer experts than it has, its numbers are only other ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # w1 [E, n, H], w2 [E, H, I], b1 [E, n] and b2 [E, H]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # that backends compute experts in


@dataclass(frozen=True)
class FlatLayout:
    """Which matrices are the weights of both products.

    Attributes:
        first: paths of gate and up, [E I, H] each, or of the one that is all of the first product, [E n, H].
        second: path of the second product's weight.
        transposed: that is [E I, H], and not [E H, I].
        experts: how many.
    """

    first: tuple[str, ...]
    second: str
    transposed: bool
    experts: int

    def operands(self, module: nn.Module) -> tuple[Tensor, Tensor, None, None]:
        """w1 [E, n, H], or [E, 2, I, H] of a copy of two matrices, which the pass `experts` makes none of; w2 [E, H, I]."""
        first, second = [attrgetter(path)(module) for path in self.first], attrgetter(self.second)(module)
        hidden, columns = first[0].shape[1], second.shape[1]
        if len(first) == 1:
            w1 = first[0].view(self.experts, -1, hidden)
        else:
            w1 = torch.cat(first).view(2, self.experts, -1, hidden).transpose(0, 1)
        w2 = second.view(self.experts, -1, columns)
        return w1, w2.transpose(1, 2) if self.transposed else w2, None, None

    def num_ids(self, module: nn.Module) -> int:
        """How many ids the weights have rows for."""
        return self.experts

    def moved(self, module: nn.Module) -> list[Any]:
        """The parameters that must lie in one tensor, in this order."""
        return [attrgetter(path)(module) for path in self.first] if len(self.first) > 1 else []


def flat_layouts(module: nn.Module) -> list[FlatLayout]:
    """Those that the module may have, by shapes; none if it has anything besides two or three matrices that fit each other."""
    owned = dict(module.named_parameters())
    if len(owned) not in (2, 3) or any(True for _ in module.buffers()) or not all(_is_matrix(weight) for weight in owned.values()):
        return []
    owners = [part for part in module.modules() if part._parameters]
    if any(type(part).__module__.startswith("torch.nn") for part in owners) or any(map(_is_hooked, module.modules())):
        return []
    return list(_fitting(module, {name: (weight.shape[0], weight.shape[1]) for name, weight in owned.items()}))


def _fitting(module: nn.Module, shapes: dict[str, tuple[int, int]]) -> Iterator[FlatLayout]:
    for experts in _numbers_of_experts(module):
        for second in reversed(shapes):  # it stands last, as a rule
            first = tuple(name for name in shapes if name != second)
            (rows, hidden), (second_rows, columns) = shapes[first[0]], shapes[second]
            if len({shapes[name] for name in first}) > 1 or rows % experts or second_rows % experts:
                continue
            wide = len(first) * rows // experts
            for transposed in (True, False):
                inner, given = (second_rows // experts, columns) if transposed else (columns, second_rows // experts)
                if given == hidden and wide in ((2 * inner,) if len(first) > 1 else (inner, 2 * inner)):
                    yield FlatLayout(first, second, transposed, experts)


def _numbers_of_experts(module: nn.Module) -> list[int]:
    named = (pair for part in module.modules() for pair in vars(part).items())
    return sorted({value for name, value in named if "exp" in name and type(value) is int and value > 1})


def _is_matrix(weight: Any) -> bool:
    return type(weight) is nn.Parameter and weight.dim() == 2 and weight.is_contiguous() and weight.dtype in DTYPES


def _is_hooked(part: nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
