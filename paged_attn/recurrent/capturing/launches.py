"""What a call launches, told so that two calls can be compared: a replay launches what the recording did, whatever changed since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CONSTANTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}


class NotCapturable(RuntimeError):
    """Why a graph cannot hold a call, in words that go on from "it"."""


class Launches(TorchDispatchMode):
    """Inside, `told` grows by a line for each operation: its name, its numbers, and where its tensors come from.

    Args:
        given: tensors that may be others in each call, at addresses that never move.
        kept: tensors that are the same in all calls.

    Raises:
        NotCapturable: from inside the call, where it asks for a value of a tensor, or reads a tensor of any other origin.
    """

    def __init__(self, given: Sequence[Tensor], kept: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.told: list[str] = []
        self._origins = {id(tensor): f"kept {id(tensor)}" for tensor in kept} | {id(t): f"given {i}" for i, t in enumerate(given)}
        self._alive: list[Any] = []  # an id is told from another only while its object lives
        self._made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _VALUES & set(func.tags) and not (func is aten.index.Tensor and not _masks(args[1])):
            raise NotCapturable(f"it asks for values of a tensor ({func})")
        if func in _CONSTANTS and id(args[0]) not in self._origins:
            self._origins[id(args[0])] = f"constant {args[0].dtype} {args[0].device} {args[0].tolist()}"
        self.told.append(f"{func} {tree_map_only(Tensor, lambda tensor: self._origin(tensor, func), (args, kwargs))}")
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self._origins:
                self._origins[id(leaf)] = f"made {self._made}"
                self._made += 1
        self._alive.append((args, kwargs, result))
        return result

    def _origin(self, tensor: Tensor, func: Any) -> str:
        if id(tensor) not in self._origins:
            raise NotCapturable(f"it reads a tensor {list(tensor.shape)} in {func} that is no parameter and no buffer of the module")
        return f"{self._origins[id(tensor)]} {list(tensor.shape)}"


def _masks(indices: Any) -> bool:
    """Whether one chooses by being true: then how many are chosen depends on the data."""
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)


def first_difference(one: Sequence[str], other: Sequence[str]) -> str:
    """In words, or "" where both are the same."""
    for first, second in zip(one, other, strict=False):
        if first != second:
            return f"{first} in one step, {second} in another"
    return "" if len(one) == len(other) else f"{len(one)} operations in one step, {len(other)} in another"
