"""The common steps of two tapes of one block, for different numbers of tokens, with their numbers made valid for any number of tokens.

A block that loops over its data takes different steps for different tokens, but the steps before and after the loop are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from paged_attn.engine.tracing.looping.tape import Slot, Step, Tape


@dataclass(frozen=True)
class Times:
    """So many times the number of tokens; or that divided by `parts` and rounded down, as capacities of experts are."""

    factor: int
    parts: int = 1


class _Differs(ValueError):
    pass


@dataclass(frozen=True)
class TwoTapes:
    """Tapes of `tokens[0]` and of `tokens[1]` tokens; numbers may be made from tokens per expert, if there are `experts`."""

    tapes: tuple[Tape, Tape]
    tokens: tuple[int, int]
    experts: int = 1

    def common(self) -> dict[int, Step]:
        """By their place on the first tape, the steps that are the same from the start on, and from the end back."""
        one, two = (tape.steps for tape in self.tapes)
        found: dict[int, Step] = {}
        shortest, before = min(len(one), len(two)), 0
        while before < shortest and (step := self._same_step(before, before)) is not None:
            found[before] = step
            before += 1
        for back in range(1, shortest - before + 1):
            if (step := self._same_step(len(one) - back, len(two) - back)) is None:
                break
            found[len(one) - back] = step
        return found

    def _same_step(self, first: int, second: int) -> Step | None:
        one, two = self.tapes[0].steps[first], self.tapes[1].steps[second]
        if one.function != two.function or len(one.results) != len(two.results) or len(one.written) != len(two.written):
            return None
        try:
            for slots in zip(one.results, two.results, strict=True):
                self.generalised(*(None if slot is None else self._value(tape, slot) for tape, slot in enumerate(slots)))
            return replace(one, args=self.generalised(one.args, two.args), kwargs=self.generalised(one.kwargs, two.kwargs))
        except _Differs:
            return None

    def _value(self, tape: int, slot: Slot) -> Any:
        value: Tensor = self.tapes[tape].values[slot.index]
        return tuple(value.shape), value.dtype

    def generalised(self, one: Any, two: Any) -> Any:
        """Arguments of the first tape, with `Times` for the number of tokens. Raises ValueError where the tapes differ in more."""
        if type(one) is not type(two):
            raise _Differs(f"{one!r} and {two!r}")
        if isinstance(one, Slot):
            return self._same_slot(one, two)
        if isinstance(one, dict):
            if one.keys() != two.keys():
                raise _Differs(f"{one!r} and {two!r}")
            return {key: self.generalised(one[key], two[key]) for key in one}
        if isinstance(one, slice):
            return slice(*(self.generalised(getattr(one, name), getattr(two, name)) for name in ("start", "stop", "step")))
        if isinstance(one, tuple | list):
            if len(one) != len(two):
                raise _Differs(f"{one!r} and {two!r}")
            return type(one)(self.generalised(*pair) for pair in zip(one, two, strict=True))
        return self._same_number(one, two)

    def _same_number(self, one: Any, two: Any) -> Any:
        if one == two:
            return one
        for parts in (1, self.experts) if type(one) is int and one > 0 else ():
            factor = -(-one * parts // self.tokens[0])
            if (factor * self.tokens[0] // parts, factor * self.tokens[1] // parts) == (one, two):
                return Times(factor, parts)
        raise _Differs(f"{one!r} and {two!r}")

    def _same_slot(self, one: Slot, two: Slot) -> Slot:
        """The slot of both tapes: of one name, or made by steps that are as far from the start, or from the end."""
        origins = [tape.origin[slot.index] for tape, slot in zip(self.tapes, (one, two), strict=True)]
        from_end = [(len(tape.steps) - o[0], o[1]) if isinstance(o, tuple) else None for tape, o in zip(self.tapes, origins, strict=True)]
        if origins[0] == origins[1] or (from_end[0] is not None and from_end[0] == from_end[1]):
            return one
        raise _Differs(f"{origins[0]} and {origins[1]}")
