"""Pinned memory that kernels still read or write. PyTorch, which does not know of that, would hand it out again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor


class HeldMemory:
    """Keeps tensors until the device has passed an event."""

    def __init__(self) -> None:
        self._held: deque[tuple[torch.cuda.Event, Sequence[Tensor]]] = deque()
        self._lock = threading.Lock()

    def hold(self, tensors: Sequence[Tensor], event: torch.cuda.Event) -> None:
        """Keep `tensors` until `event`, which is recorded; lets go of earlier ones whose events have passed."""
        with self._lock:
            while self._held and self._held[0][0].query():
                self._held.popleft()
            self._held.append((event, tensors))
