"""Why a compiled model has no engine, for as long as that holds."""

from __future__ import annotations

from torch import nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.model.model_state import ModelState

MOST = 3  # engines that are tried for a model that changes, and is refused each time


class LastingRefusalError(UnsupportedError):
    """It stays, however the model changes."""


class Refusal:
    """Attributes:
    why: "" where there is none.
    """

    def __init__(self) -> None:
        self.why = ""
        self._was: ModelState | None = None
        self._count = 0

    def note(self, model: nn.Module, error: UnsupportedError) -> None:
        self._count += 1
        lasts = isinstance(error, LastingRefusalError) or self._count == MOST
        self.why, self._was = str(error), None if lasts else ModelState(model)

    def holds(self) -> bool:
        """Whether there was one, and the model has the modules, parameters and hooks that it had then."""
        if self._was is not None and (found := self._was.difference()) is not None and found.replaced:
            self.why, self._was = "", None
        return bool(self.why)
