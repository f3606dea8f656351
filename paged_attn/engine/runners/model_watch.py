"""Notices changes in a live engine's model: it follows values written in place, and names changes that it cannot follow."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.model.model_state import Difference, ModelState
from paged_attn.engine.runners.runner import Runner

logger = logging.getLogger("paged_attn")
STEPS_BETWEEN = 32  # in a busy engine: a check takes as long as the host work of a few steps
NAMED = 3


class ModelChangedError(UnsupportedError):
    """The model is no longer what the engine runs. `changes`: what changed, in words that name it."""

    changes = ""


class ModelWatch:
    """Watches one engine's model. `captured`: graphs were recorded, which compute what the model computed then, at the addresses that it
    had."""

    def __init__(self, runner: Runner, captured: bool) -> None:
        self.runner, self.captured = runner, captured
        self.state = ModelState(runner.model)

    def may_be_stale(self) -> bool:
        """Whether numbers of the model were written, as far as a microsecond tells: `look` knows."""
        return self.state.may_be_written()

    @contextmanager
    def own_writes(self) -> Iterator[None]:
        """What is written inside, by a step, is what the model itself writes when it is called (a counter, K and V in buffers): no change
        of it, then or later."""
        before = self.state.versions()
        yield
        self.state.leave_out_written_since(before)

    def look(self) -> bool:
        """Whether what was computed of cached tokens is no longer what the model computes. Raises ModelChangedError: the engine goes on
        with something that the model no longer is; the message names it. Once the model is as it was, so is the engine."""
        found = self.state.difference()
        if found is None:
            return False
        if otherwise := self.runner.changed_attention(found):
            raise model_changed(otherwise, "and attention goes on as it was proved from what was there before")
        stale = found.written or bool(found.moved)
        if self.runner.follows_the_model and not self.captured:
            stale = stale or bool(found.replaced) or (bool(found.altered) and not self.runner.computes_the_same())
        else:
            self._refuse(found)
        if stale:
            logger.info("the weights of %s changed: what was computed with the old ones is forgotten", type(self.runner.model).__name__)
        self.state.take()
        if stale:
            self.runner.remember()
        return stale

    def _refuse(self, found: Difference) -> None:
        followed = [name for name in found.moved if not self.captured and self.runner.reads(name)]  # uncaptured: any address works
        lasting = found.replaced + [f"{name} lies at another address" for name in found.moved if name not in followed]
        if lasting:
            raise model_changed(lasting, "and the engine goes on with what was there before")
        if found.altered and not self.runner.computes_the_same():
            raise model_changed(found.altered, "and the model gives other logits than the engine's graph of it")
        if found.altered:
            logger.info("changed, and the model gives the logits of its graph nevertheless: %s", _named(found.altered))


def model_changed(changes: list[str], then: str) -> ModelChangedError:
    """What changed, in words that name it, and what follows."""
    error = ModelChangedError(
        f"the model was changed under a live engine: {_named(changes)}, {then}. Change it back, or make a new LLM of the model "
        "as it is now, after llm.close(). Numbers written in place (load_state_dict, an optimizer's step) are followed, but for those that "
        "attention's mask, bias or scale is made of."
    )
    error.changes = _named(changes)
    return error


def _named(changes: list[str]) -> str:
    more = f" (and {len(changes) - NAMED} more)" if len(changes) > NAMED else ""
    return "; ".join(changes[:NAMED]) + more
