"""Who wants to know what the engine's thread does."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Called on the engine's thread. Seconds are wall time; of requests since they arrived."""

    def step(self, seconds: float) -> None: ...
    def step_failed(self) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def ended(self, outcome: str, seconds: float) -> None: ...
