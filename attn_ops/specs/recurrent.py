"""The state that a recurrent layer keeps per request between steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateSpec:
    """One state tensor of one request in one layer: where the model keeps it, its shape without the batch dimension, its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def describe(self) -> str:
        """`conv_states[0] 64x4 float32`."""
        return f"{self.name} {'x'.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class RecurrentSpec:
    """One recurrent layer: the path of its module in the model, and what it keeps per request between steps."""

    module: str
    states: tuple[StateSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one request's state in this layer."""
        return sum(state.nbytes for state in self.states)


def slot_bytes(layers: Sequence[RecurrentSpec]) -> int:
    """Bytes of one request's state in all layers."""
    return sum(layer.nbytes for layer in layers)
