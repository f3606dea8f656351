"""Where an expert module keeps its weights, and which of them may be moved.

transformers' modules say so by flags (`is_transposed`, `has_bias`, ...). Other modules, from remote code, may be experts if they are called
with hidden states, ids and weights, and hold either

- two stacked weights whose shapes fit each other, or
- matrices [E n, m] of all experts' rows, their own or those of an inner module (DBRX).

What any of them computes is then proved.

A matrix of all rows does not say how many experts it holds, so the module's numbers whose names mention experts are tried, small ones
first. The order matters: on a GPU, ids beyond a module's experts may end the process, while too few experts only give different results.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paged_attn.passes.optimize.linears.mergeable_weights import Memory, is_ordinary_parameter, lie_in_a_row

FLAGS = ("has_gate", "has_bias", "is_transposed")
OTHER_KINDS = ("has_post_expert_norm",)  # flag added after transformers 5.17
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # dtypes that backends compute experts in
Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # w1 [E, n, H], w2 [E, H, I], b1 [E, n] and b2 [E, H]


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


def layouts_of(module: nn.Module) -> Sequence[Layout | FlatLayout]:
    """The layouts that the module may have, by flags or by shapes; none if it is not a module of experts, or has no plain tensors."""
    if any(getattr(module, kind, False) for kind in OTHER_KINDS):
        return []
    if all(hasattr(module, flag) for flag in FLAGS):
        return _by_flags(module)
    return (_by_shapes(module) or flat_layouts_of(module)) if len(inspect.signature(module.forward).parameters) == 3 else []


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


def flat_layouts_of(module: nn.Module) -> list[FlatLayout]:
    """The layouts that the module may have, by shapes; none if it has anything besides two or three matrices that fit each other."""
    owned = dict(module.named_parameters())
    if len(owned) not in (2, 3) or any(True for _ in module.buffers()) or not all(_is_matrix(weight) for weight in owned.values()):
        return []
    owners = [part for part in module.modules() if part._parameters]
    if any(type(part).__module__.startswith("torch.nn") for part in owners) or any(map(is_hooked, module.modules())):
        return []
    return list(_fitting(module, {name: (weight.shape[0], weight.shape[1]) for name, weight in owned.items()}))


def _fitting(module: nn.Module, shapes: dict[str, tuple[int, int]]) -> Iterator[FlatLayout]:
    for experts in _numbers_of_experts(module):
        for second in reversed(shapes):  # usually the last one
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


def is_hooked(part: nn.Module) -> bool:
    """Whether a module has hooks or a replaced forward."""
    return bool(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))


class MovableWeights:
    """Which weights of one model may be moved."""

    def __init__(self, model: nn.Module) -> None:
        self._memory = Memory([*model.parameters(), *model.buffers()])
        self._owners = Counter(id(weight) for module in model.modules() for weight in module._parameters.values() if weight is not None)

    def other_kind(self, weights: Iterable[Any]) -> str:
        """Why some are not ordinary parameters, as a rank's shards are none, or have rows that are not aligned; empty if all are."""
        other = next((weight for weight in weights if not is_ordinary_parameter(weight)), None)
        if other is None:
            return ""
        kind = f"{type(other).__name__} {list(other.shape)} of {other.dtype}"
        return f"a weight of its experts is a {kind}; known are dense parameters with rows of a multiple of 16 bytes together"

    def shared(self, columns: Iterable[Sequence[Any]]) -> str:
        """Which weights something else uses too; empty if none. `columns`: those to be moved into one tensor each."""
        for column in columns:
            single = all(self._owners[id(weight)] == 1 for weight in column)
            if not single or not (lie_in_a_row(column) or all(self._memory.is_own(weight) for weight in column)):
                shape = list(column[0].shape)
                return f"the weights {shape} of its experts cannot be moved into one tensor: something else uses their memory too"
        return ""
