"""How tokens are chosen in a benchmark, the same in every system. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sampling:
    """Settings of every request, by the names that all systems share; temperature 0 is greedy, top_p 1 and top_k 0 are off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def given(self) -> dict[str, Any]:
        """What is not off."""
        return {name: value for name, value in vars(self).items() if value != getattr(Sampling, name)}

    @property
    def for_transformers(self) -> dict[str, Any]:
        """Arguments of `generate`, which takes from a model's own settings what it is not told."""
        return {"do_sample": False} if self.is_greedy else {"do_sample": True, **vars(self)}

    def __str__(self) -> str:
        return "greedy" if self.is_greedy else ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in self.given.items())
