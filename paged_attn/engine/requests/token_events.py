"""The events of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import overload

from paged_attn.engine.requests.outputs import TokenEvent


class TokenEvents(Sequence[TokenEvent]):
    """Events in order, equal to a list of the same events; adding other events gives a list. The event of a plain token is created when it
    is read: creating hundreds takes longer than everything else done with a step's tokens, and callers that wait for whole texts read none.

    Attributes:
        append: appends an event, or for `TokenEvent(id, token, "")` the pair (id, token).
    """

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __init__(self) -> None:
        self._created: list[TokenEvent] = []  # the first ones, which stay the same objects from now on
        self._appended: list[TokenEvent | tuple[str, int]] = []
        self.append: Callable[[TokenEvent | tuple[str, int]], None] = self._appended.append

    def without(self, request_id: str) -> TokenEvents:
        """The events of the other requests."""
        others = TokenEvents()
        for event in self:
            if event.request_id != request_id:
                others.append(event)
        return others

    def __len__(self) -> int:
        return len(self._appended)

    def __iter__(self) -> Iterator[TokenEvent]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> TokenEvent: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenEvent]: ...
    def __getitem__(self, index: int | slice) -> TokenEvent | list[TokenEvent]:
        return self._all()[index]

    def __add__(self, others: Iterable[TokenEvent]) -> list[TokenEvent]:
        return [*self, *others]

    def __radd__(self, others: Iterable[TokenEvent]) -> list[TokenEvent]:
        return [*others, *self]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, TokenEvents)):
            return NotImplemented
        return len(self) == len(other) and self._all() == list(other)

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> list[TokenEvent]:
        new = islice(self._appended, len(self._created), None)
        self._created += [each if isinstance(each, TokenEvent) else TokenEvent(*each, "") for each in new]
        return self._created
