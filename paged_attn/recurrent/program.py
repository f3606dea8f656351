"""What computes a recurrent layer by ops in the place of its own forward, and the error of a layer that none can compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from paged_attn.attn_ops.specs.recurrent import RecurrentSpec, StateSpec


class NoOpFits(Exception):
    """Why a layer does not compute what an op computes."""


class Part(NamedTuple):
    """The module's state at this index; with `dim` (0: the rows), what it holds there at `at`."""

    state: int
    dim: int | None = None
    at: int = 0


@dataclass(frozen=True)
class StateLayout:
    """How a state of the module, or a part of one, becomes the op's: the sizes of its axes, and which of them each dimension of the op's
    state holds."""

    part: Part
    axes: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]

    def spec(self, states: Sequence[StateSpec]) -> StateSpec:
        """The op's state, for the module's."""
        spec, (_, dim, at) = states[self.part.state], self.part
        where = "" if dim is None else f"[{':, ' * (dim - 1)}{at}]"
        return StateSpec(spec.name + where, tuple(math.prod(self.axes[axis] for axis in each) for each in self.dims), spec.dtype)

    def of(self, states: Sequence[Tensor]) -> Tensor:
        """The op's state [N, *shape], of the module's states [N, ...]."""
        state = states[self.part.state]
        if self.part.dim is not None:
            state = state.select(self.part.dim, self.part.at)
        order = [1 + axis for dim in self.dims for axis in dim]
        sizes = [math.prod(self.axes[axis] for axis in dim) for dim in self.dims]
        return state.reshape(len(state), *self.axes).permute(0, *order).reshape(len(state), *sizes)


@dataclass(frozen=True)
class Program:
    """Computes a layer's output for rows of tokens of any requests; called under a forward context, or traced.

    Attributes:
        function: (layer's index, inputs [T, 1, ...], tensors of the module) -> output [T, 1, ...].
        inputs: which of the layer's inputs it takes.
        owned: the paths of the module's tensors that it takes.
        ops: the names of its ops.
        states: the layout of each op's state.
        spec: what the module itself keeps.
        text: all of it, as text.
    """

    function: Callable[..., Tensor]
    inputs: tuple[int, ...]
    owned: tuple[str, ...]
    ops: tuple[str, ...]
    states: tuple[StateLayout, ...]
    spec: RecurrentSpec
    text: str

    def run(self, module: nn.Module, inputs: Sequence[Tensor], layer_id: int) -> Tensor:
        """The output [1, T, ...] for all the layer's inputs [1, T, ...]."""
        rows = [inputs[index].transpose(0, 1) for index in self.inputs]
        tensors = [tensor_at(module, path) for path in self.owned]
        return self.function(layer_id, *rows, *tensors).transpose(0, 1)


def tensor_at(module: nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value
