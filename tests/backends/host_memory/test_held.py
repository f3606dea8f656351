"""How long memory is kept that kernels read or write."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from paged_attn.backends.host_memory.held import TOGETHER, HeldMemory


class Event:
    """One that was recorded on a stream (by number), and passes when it is told to."""

    made: list[Event] = []

    def __init__(self) -> None:
        self.passed, self.stream = False, 0
        self.made.append(self)

    def record(self, stream: SimpleNamespace) -> None:
        self.stream = stream.cuda_stream

    def query(self) -> bool:
        return self.passed


def test_memory_is_kept_until_its_event_has_passed() -> None:
    held, events = HeldMemory(), [Event() for _ in range(3)]
    tensors = [torch.zeros(size) for size in (1, 2, 3)]
    kept = [weakref.ref(tensor) for tensor in tensors]
    for event in events:
        held.hold([tensors.pop(0)], event)  # type: ignore[arg-type]
    assert all(each() is not None for each in kept)
    events[0].passed = events[1].passed = True
    held.hold([], Event())  # type: ignore[arg-type]
    assert [each() is None for each in kept] == [True, True, False]


def test_kernels_of_a_stream_share_an_event_that_is_recorded_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(cuda_stream=5)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(Event, "made", [])
    held, kept = HeldMemory(), []

    def use(count: int) -> None:
        for _ in range(count):
            tensor = torch.zeros(1)
            kept.append(weakref.ref(tensor))
            held.hold_in_use(tensor, 0)

    use(TOGETHER - 1)
    stream.cuda_stream = 6
    use(1)
    assert not Event.made, "of another stream, which says nothing of these"
    stream.cuda_stream = 5
    use(1)
    assert [event.stream for event in Event.made] == [5]
    Event.made[0].passed = True
    use(TOGETHER)
    assert [each() is None for each in kept] == [True] * (TOGETHER - 1) + [False, True] + [False] * TOGETHER
