"""Experts whose products are two modules, each with one stacked weight, that are given rows sorted by expert (JetMoE, ScatterMoE).

How such a module is told which rows belong to which expert does not matter: it is only ever run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.specs.experts import ExpertsSpec, Gating
from paged_attn.calling.left_as_it_was import replaced_forward
from paged_attn.engine.tracing.experts_as_ops import known_gates
from paged_attn.engine.tracing.experts_layout import Operands, is_stacked
from paged_attn.engine.tracing.looping.product_weights import instead, scaled
from paged_attn.engine.tracing.looping.tape import Tape


@dataclass(frozen=True)
class StackedPair:
    """What the experts of two such modules compute, if what stands between them is `gating`; called as `ExpertMLP`."""

    gating: Gating
    spec: ExpertsSpec

    def linears(self, experts: Sequence[nn.Module]) -> tuple[list[Any], list[Any]]:
        """The modules of both products."""
        first, second = experts
        return [first], [second]

    def stacked(self, first: Sequence[Any], second: Sequence[Any]) -> Operands:
        """w1 [E, 2 I, H] (I without a gate) and w2 [E, H, I] as they lie, and no biases."""
        return _weight(first[0]), _weight(second[0]), None, None

    def columns(self, experts: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
        """The parameters of each operand."""
        return [[_weight(module)] for module in experts]

    @contextmanager
    def louder(self, experts: Sequence[nn.Module], size: float) -> Iterator[None]:
        """Inside, the first product is so much larger."""
        with instead([(experts[0], _name(experts[0]), scaled(size))]):
            yield

    @contextmanager
    def one_hot(self, experts: Sequence[nn.Module], tape: Tape, fed: list[Tensor]) -> Iterator[None]:
        """Inside, the first module notes in `fed` what it is given, the second gives one-hot rows, with a one in their expert's place."""
        first, second = experts
        compute, hidden = second.forward, self.spec.hidden

        def note(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            with tape.expert() as taken:
                fed.append(rows.detach().reshape(-1, hidden).clone())
                return taken(rows.new_zeros((*rows.shape[:-1], _weight(first).shape[1])))

        def one_hot(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            with tape.expert() as taken, instead([(second, _name(second), _one_in_place)]):
                return taken(compute(torch.ones_like(rows), *args, **kwargs))

        with replaced_forward(first, note), replaced_forward(second, one_hot):
            yield


def _one_in_place(weight: Tensor) -> Tensor:
    own = torch.zeros_like(weight)
    expert = torch.arange(len(own), device=own.device)
    own[expert, expert, 0] = 1.0
    return own


def stacked_pairs(block: nn.Module, experts: Sequence[nn.Module]) -> list[StackedPair]:
    """Every gate that may stand between two such modules; none for experts of another kind."""
    if len(experts) != 2 or not all(holds_one_stack(module) for module in experts):
        return []
    w1, w2 = (_weight(module) for module in experts)
    gates = known_gates(block, w1.shape[1] == 2 * w2.shape[2])
    return [StackedPair(gating, ExpertsSpec(len(w1), w1.shape[2], w2.shape[2], gating)) for gating in gates]


def pair_within(module: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """The two children of it that may be the products of experts, by the shapes of their weights; in their own order, if both fit."""
    stacks = [child for child in module.children() if holds_one_stack(child)]
    if len(stacks) != 2:
        return None
    for first, second in (stacks, stacks[::-1]):
        w1, w2 = _weight(first), _weight(second)
        if w1.shape[:1] == w2.shape[:1] and w1.shape[2] == w2.shape[1] and w1.shape[1] in (w2.shape[2], 2 * w2.shape[2]):
            return first, second
    return None


def holds_one_stack(module: nn.Module) -> bool:
    """Whether a stacked weight is the one tensor that it has."""
    tensors = [*module.parameters(), *module.buffers()]
    return len(tensors) == 1 and len(module._parameters) == 1 and is_stacked(tensors[0])


def _name(module: nn.Module) -> str:
    return next(iter(module._parameters))


def _weight(module: nn.Module) -> Any:
    return next(module.parameters())
