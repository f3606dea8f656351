"""Which parameters of experts may be moved, so that they lie in one tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from paged_attn.passes.optimize.linears.mergeable_weights import Memory, is_ordinary_parameter, lie_in_a_row


class MovableWeights:
    """Of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._memory = Memory([*model.parameters(), *model.buffers()])
        self._owners = Counter(id(weight) for module in model.modules() for weight in module._parameters.values() if weight is not None)

    def other_kind(self, weights: Iterable[Any]) -> str:
        """Why some are no ordinary parameters, as a rank's shards are none, or have rows that are not aligned; empty if all are."""
        other = next((weight for weight in weights if not is_ordinary_parameter(weight)), None)
        if other is None:
            return ""
        kind = f"{type(other).__name__} {list(other.shape)} of {other.dtype}"
        return f"a weight of its experts is a {kind}; known are dense parameters with rows of a multiple of 16 bytes together"

    def shared(self, columns: Iterable[Sequence[Any]]) -> str:
        """Which weights somebody else has, too; empty if nobody has. `columns`: those that shall lie in one tensor each."""
        for column in columns:
            single = all(self._owners[id(weight)] == 1 for weight in column)
            if not single or not (lie_in_a_row(column) or all(self._memory.is_own(weight) for weight in column)):
                shape = list(column[0].shape)
                return f"the weights {shape} of its experts can not be moved into one tensor: somebody else has their memory, too"
        return ""
