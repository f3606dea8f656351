"""The graphs of one model: which shapes were captured, what each cost, and why the others were not."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from paged_attn.attn_ops.errors import CaptureError
from paged_attn.capture.recorder import Recorder
from paged_attn.capture.segments import Segments, record

logger = logging.getLogger("paged_attn")
Mode = Literal["full", "pieces"]
MIB = 2**20


class GraphKey(NamedTuple):
    """Full graphs hold decode steps of `size` requests, pieces any step of `size` rows; variant: which of a backend's kernels."""

    mode: Mode
    size: int
    variant: int = 0

    def __str__(self) -> str:
        return f"{self.mode} {self.size}" + (f" (variant {self.variant})" if self.variant else "")


@dataclass(frozen=True)
class Recipe:
    """How to record one shape.

    Attributes:
        run: the model's step on its fixed inputs.
        breaks: ops that stay outside the graphs.
        keep: tensors that outlive the recording.
        state: whatever a replay needs besides (a batch, a plan); kept with the graphs.
    """

    run: Callable[[], Any]
    breaks: Callable[[Any], bool]
    keep: Sequence[Tensor]
    state: Any = None


@dataclass(frozen=True)
class Captured:
    """One captured shape: its graphs, their state, device bytes that it added, and seconds that it took."""

    key: GraphKey
    segments: Segments
    state: Any
    nbytes: int
    seconds: float


Prepare = Callable[[GraphKey], AbstractContextManager[Recipe]]


@dataclass
class GraphSet:
    """Captures shapes into one recorder, under a budget.

    A shape that can not be captured is left out with its reason, which `refused` keeps; with `strict` that raises.
    """

    recorder: Recorder
    budget: int
    strict: bool = False
    captured: dict[GraphKey, Captured] = field(default_factory=dict)
    refused: dict[GraphKey, str] = field(default_factory=dict)
    nbytes: int = 0

    def capture(self, keys: Sequence[GraphKey], prepare: Prepare) -> Iterator[GraphKey]:
        """Capture shapes in the order given, and yield each when it has been dealt with.

        Raises:
            CaptureError: with `strict`, for the first shape that can not be captured or does not fit the budget.
        """
        gc.collect()  # once: what lies in cycles must not be counted as a graph's, and a collection takes long
        before = self.recorder.bytes_in_use()
        for key in keys:
            before = self._capture(key, prepare, before)
            yield key

    def _capture(self, key: GraphKey, prepare: Prepare, before: int) -> int:
        if self.nbytes >= self.budget:
            self._refuse(key, f"the graphs before it take {self.nbytes / MIB:,.0f} MiB of the {self.budget / MIB:,.0f} MiB allowed")
            return before
        started, mark = time.perf_counter(), self.recorder.mark()
        try:
            with prepare(key) as recipe:
                with self.recorder.session():
                    recipe.run()  # what runs for the first time may compile, allocate or wait, which a recording must not
                segments = record(recipe.run, self.recorder, recipe.breaks, recipe.keep)
                state = recipe.state
        except RuntimeError as error:
            self.recorder.rollback(mark)
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
            self._refuse(key, reason, error)
            return self.recorder.bytes_in_use()
        after = self.recorder.bytes_in_use()
        added = max(after - before, 0)
        if self.nbytes + added > self.budget:
            del segments, recipe, state
            self.recorder.rollback(mark)
            self._refuse(
                key,
                f"it would add {added / MIB:,.0f} MiB to {self.nbytes / MIB:,.0f} MiB of graphs; {self.budget / MIB:,.0f} MiB are allowed",
            )
            return self.recorder.bytes_in_use()
        self.nbytes += added
        self.captured[key] = Captured(key, segments, state, added, time.perf_counter() - started)
        return after

    def _refuse(self, key: GraphKey, reason: str, error: BaseException | None = None) -> None:
        if self.strict:
            raise CaptureError(
                f"the graph {key} can not be captured: {reason}. Without graph_strict this shape would run uncaptured"
            ) from error
        self.refused[key] = reason
        logger.warning("graph %s is not captured: %s", key, reason)

    def sizes(self, mode: Mode) -> list[int]:
        """Captured sizes of a mode, ascending, with variant 0."""
        return sorted(key.size for key in self.captured if key.mode == mode and key.variant == 0)

    def clear(self) -> None:
        """Free every graph."""
        self.captured.clear()
        self.refused.clear()
        self.nbytes = 0
        self.recorder.rollback(0)
