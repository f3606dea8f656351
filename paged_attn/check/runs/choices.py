"""What a model chooses, and how: runs whose numbers are moved a little, so that near ties fall otherwise, and runs of the model's own
numbers in which what was chosen there is taken again.

A choice is an operation that makes whole numbers or truth values of floating ones: the best k, a sort, a comparison, a step of a
quantiser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.check.runs.tapped import TappedRun, Taps, Visit, is_in_flight, tensors_in, wider
from paged_attn.passes.fx.graph_tools import name_of
from paged_attn.passes.fx.memory import is_view, writes_in_place

Choices = Mapping[str, Any]  # by node: the operation's result
# Results are floating numbers that no kernel rounds (counts, ones among zeros); integers made from them are not choices.
COUNTS = ("histc", "scatter")


def same_choices(one: Choices, other: Choices) -> bool:
    """Whether two runs chose the same. Values that come with chosen indices are ignored."""
    taken = [[t for result in choices.values() for t in tensors_in(result) if not t.is_floating_point()] for choices in (one, other)]
    return one.keys() == other.keys() and all(torch.equal(mine, theirs) for mine, theirs in zip(*taken, strict=True))


@dataclass(frozen=True)
class Perturbation:
    """How the numbers of one run are perturbed.

    Attributes:
        generator: on the numbers' device: the host would take seconds for a billion of them.
        units: numbers are moved by up to this many halves of a unit in the last place: 1 is what another kernel may do.
        choices: filled in by the run.
    """

    generator: torch.Generator
    units: float = 1.0
    choices: dict[str, Any] = field(default_factory=dict)

    def moved(self, value: Tensor, narrow: torch.dtype) -> Tensor:
        """A floating-point tensor in its dtype with each number moved, relative to the coarser precision of `narrow` and its dtype."""
        step = max(torch.finfo(dtype).eps for dtype in (value.dtype, narrow)) / 2 * self.units
        wide = torch.promote_types(value.dtype, wider(narrow))
        factor = torch.empty(value.shape, dtype=wide, device=self.generator.device).uniform_(1 - step, 1 + step, generator=self.generator)
        return (value * factor.to(value.device)).to(value.dtype)


class PerturbedRun(TappedRun):
    """`run(*inputs)` with every result in the model's own dtype perturbed, as another order of summation or another kernel might. `narrow`:
    the model's own floating-point dtype."""

    def __init__(self, gm: fx.GraphModule, taps: Taps, visit: Visit, narrow: torch.dtype, perturbation: Perturbation) -> None:
        super().__init__(gm, taps, visit)
        self.narrow, self.perturbation = narrow, perturbation

    def compute(self, n: fx.Node) -> Any:
        result = super().compute(n)
        if n.op not in ("call_function", "call_method") or is_view(n) or writes_in_place(n) or is_in_flight(n):
            return result
        given = [self.given(node, n) for node in n.all_input_nodes]
        if not any(tensor.is_floating_point() for tensor in tensors_in(given)):
            return result
        if any(not tensor.is_floating_point() for tensor in tensors_in(result)):
            self.perturbation.choices[n.name] = result
        elif type(result) is Tensor and result.dtype == self.narrow and name_of(n) not in COUNTS:
            return self.perturbation.moved(result, self.narrow)
        return result


class ChosenRun(TappedRun):
    """`run(*inputs)` with the choices of another run. Values that are returned with their indices, such as the best k, are this run's
    values at the other run's indices."""

    def __init__(self, gm: fx.GraphModule, taps: Taps, visit: Visit, choices: Choices) -> None:
        super().__init__(gm, taps, visit)
        self.choices = choices

    def compute(self, n: fx.Node) -> Any:
        result = super().compute(n)
        if n.name not in self.choices:
            return result
        chosen = self.choices[n.name]
        if isinstance(result, Tensor):
            return chosen
        given = next((value for node in n.all_input_nodes if isinstance(value := self.given(node, n), Tensor)), None)
        if given is None or len(result) != 2 or result[1].dtype != torch.int64:
            return result
        values = _taken_again(given, result[0], result[1], chosen[1])
        return result if values is None else (values, chosen[1])


def _taken_again(given: Tensor, values: Tensor, indices: Tensor, chosen: Tensor) -> Tensor | None:
    """The values of `given` at the indices `chosen`, if `values` are those at `indices` along some axis; else None."""
    keeps_axis = values.dim() == given.dim()
    for axis in range(given.dim() if indices.dim() else 0):
        at, other = (indices, chosen) if keeps_axis else (indices.unsqueeze(axis), chosen.unsqueeze(axis))
        if any(at.shape[i] > given.shape[i] for i in range(given.dim())) or int(at.max()) >= given.shape[axis]:
            continue
        if torch.equal(given.gather(axis, at), values if keeps_axis else values.unsqueeze(axis)):
            taken = given.gather(axis, other)
            return taken if keeps_axis else taken.squeeze(axis)
    return None
