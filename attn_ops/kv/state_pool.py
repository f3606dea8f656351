"""Recurrent states: one slot per running request or kept prefix, and in it the state tensors of every recurrent layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_attn.attn_ops.specs.recurrent import RecurrentSpec, slot_bytes


class StatePool:
    """`num_slots` slots of state for every recurrent layer; slot 0 is reserved for padding and requests without state.

    `states(i)` are the tensors of layer i in the order of its spec, each [num_slots, *shape]. A slot is not cleared when it is reused: a
    request without cached tokens starts from the module's own fresh state, and its first step writes the whole slot.

    Raises:
        ValueError: fewer than two slots.
    """

    def __init__(self, layers: Sequence[RecurrentSpec], num_slots: int, device: torch.device | str = "cpu") -> None:
        if num_slots < 2:
            raise ValueError(f"a state pool needs at least 2 slots (slot 0 is reserved); got num_slots={num_slots}")
        self.layers, self.num_slots = tuple(layers), num_slots
        self._states = [
            tuple(torch.zeros(num_slots, *state.shape, dtype=state.dtype, device=device) for state in layer.states) for layer in self.layers
        ]

    def states(self, layer_id: int) -> tuple[Tensor, ...]:
        """The state tensors of a layer, each [num_slots, *shape]."""
        return self._states[layer_id]

    @property
    def tensors(self) -> list[Tensor]:
        """The state tensors of all layers."""
        return [state for states in self._states for state in states]

    def release(self) -> None:
        """Free the memory even if views of it remain; they must not be used afterwards."""
        for state in self.tensors:
            state.untyped_storage().resize_(0)

    def copy(self, source: int, target: int) -> None:
        """Copy slot `source` to slot `target` in every layer."""
        for state in self.tensors:
            state[target].copy_(state[source])

    def fill(self, value: float, slot: int | None = None) -> None:
        """Set one slot, or all of them, to a number. NaN (for integers: the largest) reveals code that reads a slot it must not."""
        for state in self.tensors:
            number = value if state.is_floating_point() or value == value else torch.iinfo(state.dtype).max
            (state if slot is None else state[slot]).fill_(number)

    @property
    def slot_bytes(self) -> int:
        return slot_bytes(self.layers)

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.slot_bytes


class SlotAllocator:
    """Hands out slots 1 to `num_slots - 1`: the last freed first, fresh ones from 1 on.

    Raises:
        ValueError: no slot is free, or one is freed that is not held.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, 0, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def allocate(self) -> int:
        if not self._free:
            raise ValueError(f"all {len(self._held)} state slots are taken; ask num_free first")
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def free(self, slot: int) -> None:
        if slot not in self._held:
            raise ValueError(f"state slot {slot} is not held by anyone; held are {sorted(self._held)}")
        self._held.remove(slot)
        self._free.append(slot)
