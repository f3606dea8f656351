"""Counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineStats:
    """Counters; seconds are wall time: in the model or waiting for it, and all else in `step`."""

    steps: int = 0
    model_seconds: float = 0.0
    host_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0

    def reset(self) -> None:
        """Count from nothing again."""
        vars(self).update(vars(EngineStats()))
