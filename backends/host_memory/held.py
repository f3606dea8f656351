"""Pinned memory that kernels still read or write. PyTorch, which does not know of that, would hand it out again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

TOGETHER = 8  # tensors that wait for one event: it takes a GPU some time as well


class HeldMemory:
    """Keeps tensors until the device has passed an event; for any number of threads."""

    def __init__(self) -> None:
        self._held: deque[tuple[torch.cuda.Event, Sequence[Tensor]]] = deque()
        self._in_use: dict[tuple[int, int], list[Tensor]] = {}  # by device and stream, since the last event there
        self._lock = threading.Lock()

    def hold(self, tensors: Sequence[Tensor], event: torch.cuda.Event) -> None:
        """Keep `tensors` until `event`, which is recorded; lets go of earlier ones whose events have passed."""
        with self._lock:
            while self._held and self._held[0][0].query():
                self._held.popleft()
            self._held.append((event, tensors))

    def hold_in_use(self, tensor: Tensor, device: int) -> None:
        """Keep `tensor` until what was launched on the device's current stream has run."""
        stream = torch.cuda.current_stream(device)
        key = device, stream.cuda_stream
        with self._lock:
            in_use = self._in_use.setdefault(key, [])
            in_use.append(tensor)
            if len(in_use) < TOGETHER:
                return
            del self._in_use[key]
        event = torch.cuda.Event()
        event.record(stream)
        self.hold(in_use, event)
