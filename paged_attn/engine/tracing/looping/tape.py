"""Records what a call does to tensors, step by step: the torch functions that the model calls, seen by a torch function mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

# Functions whose results Python sees, or whose shapes depend on numbers.
_LOOKS = frozenset({
    "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__", "item", "tolist", "numpy", "is_nonzero",
    "equal", "allclose", "nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "repeat_interleave",
})  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """The tensor of that number on a tape."""

    index: int


@dataclass(frozen=True)
class Step:
    """A call of a function of torch.

    Attributes:
        args, kwargs: with slots in place of tensors.
        results: slots of the tensors that it gave, in order; those that it was given and gives back (in-place methods) keep theirs.
        several: it gives a tuple of them.
        written: slots of the tensors that it wrote into.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Slot | None, ...]
    several: bool
    written: frozenset[Slot]

    @property
    def given(self) -> set[Slot]:
        return slots_in((self.args, self.kwargs))


class Tape(TorchFunctionMode):
    """Records the steps inside; numbers that leave tensors (`tolist`, sizes) are written down as they came.

    Args:
        named: the tensors that are there before, by their names.
        instead: results to use instead of those of these steps.
        watched: how many numbers a tensor has whose states are kept, if it is made from what experts gave.

    Attributes:
        values: the tensor of each slot, as it is at the end.
        origin: of each slot, its name, or the step that made it and its place there, or None for what came from elsewhere.
        tainted: what is made from what experts gave.
        looked: (name of the function, slots) of what Python saw of numbers, or took shapes from: what it may have branched on.
        states: (step, slot, a copy of the tensor after that step) of what is watched, since the last call of an expert.
    """

    def __init__(self, named: Mapping[str, Tensor], instead: Mapping[int, Tensor] | None = None, watched: int = -1) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.values: list[Tensor] = []
        self.origin: list[str | tuple[int, int] | None] = []
        self.tainted: set[Slot] = set()
        self.states: list[tuple[int, Slot, Tensor]] = []
        self.looked: list[tuple[str, set[Slot]]] = []
        self._slots: dict[int, Slot] = {}
        self._of_memory: dict[int, set[Slot]] = {}
        self._instead, self._watched, self._resting = dict(instead or {}), watched, False
        for name, tensor in named.items():
            self._slot(tensor, name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._resting:
            return func(*args, **kwargs)
        told = map_aggregate((tuple(args), dict(kwargs)), self.slot_of)
        before = {slot: self.values[slot.index]._version for slot in slots_in(told)}
        self._look(func, told)
        result = func(*args, **kwargs)
        written = frozenset(slot for slot, version in before.items() if self.values[slot.index]._version != version)
        several = isinstance(result, tuple | list)
        parts = list(result) if several else [result]
        if not written and not any(isinstance(part, Tensor) for part in parts):
            return result
        index = len(self.steps)
        if (instead := self._instead.get(index)) is not None:
            result, parts = instead, [instead]
        made = tuple(self._slot(part, (index, place)) if isinstance(part, Tensor) else None for place, part in enumerate(parts))
        self.steps.append(Step(func, told[0], told[1], made, several, written))
        if self.tainted & before.keys():
            self._taint(index, {slot for slot in made if slot is not None}, written)
        return result

    @contextmanager
    def expert(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Nothing inside is a step; what is given to the value of the context comes from an expert."""
        self._resting = True
        self.states.clear()

        def given(tensor: Tensor) -> Tensor:
            self.tainted.add(self._slot(tensor, None))
            return tensor

        try:
            yield given
        finally:
            self._resting = False

    def slot_of(self, value: Any) -> Any:
        """The slot of a tensor, which is a new one if no step has made it; anything else as it is."""
        return self._slot(value, None) if isinstance(value, Tensor) else value

    def same_memory(self, slot: Slot) -> set[Slot]:
        """The slots of a tensor and of its views and bases."""
        return self._of_memory[_memory(self.values[slot.index])]

    def _look(self, func: Any, told: Any) -> None:
        name = getattr(func, "__name__", "")
        seen = slots_in(told)
        if name == "where":
            seen = seen if len(told[0]) == 1 and not told[1] else set()
        elif name == "__getitem__":
            seen = {slot for slot in slots_in(told[0][1:]) if self.values[slot.index].dtype in (torch.bool, torch.uint8)}
        elif name not in _LOOKS:
            return
        if seen:
            self.looked.append((name, seen))

    def _taint(self, index: int, made: set[Slot], written: frozenset[Slot]) -> None:
        self.tainted |= made | written
        touched = {slot for each in written for slot in self.same_memory(each)}
        self.tainted |= touched
        for slot in sorted(made | touched, key=lambda slot: slot.index):
            if (value := self.values[slot.index]).numel() == self._watched:
                self.states.append((index, slot, value.detach().clone()))

    def _slot(self, tensor: Tensor, origin: str | tuple[int, int] | None) -> Slot:
        if id(tensor) not in self._slots:
            slot = self._slots[id(tensor)] = Slot(len(self.values))
            self.values.append(tensor)
            self.origin.append(origin)
            self._of_memory.setdefault(_memory(tensor), set()).add(slot)
        return self._slots[id(tensor)]


def slots_in(value: Any) -> set[Slot]:
    """All slots in nested arguments."""
    found: set[Slot] = set()
    map_aggregate(value, lambda each: found.add(each) if isinstance(each, Slot) else None)
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested arguments or results, in order."""
    found: list[Tensor] = []
    map_aggregate(value, lambda each: found.append(each) if isinstance(each, Tensor) else None)
    return found


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
