"""The graphs of one model: which shapes were captured, what each cost, and why others were not."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from paged_attn.attn_ops.errors import CaptureError, UnsupportedError, first_line, triton_errors
from paged_attn.capture.graphs.recorder import Recorder
from paged_attn.capture.graphs.segments import OpNotRecorded, Segments, may_break, record

logger = logging.getLogger("paged_attn")
Mode = Literal["full", "piecewise"]
MIB = 2**20
IN_ANOTHER_PROCESS = "another process that runs this model cannot capture it or has no room for it"


class _InAnotherProcess(Exception):
    """Raised in every process if the capture fails in another one."""


class GraphKey(NamedTuple):
    """A captured shape: a full graph runs decode steps of `size` requests, a piecewise one any step of `size` rows.

    variant: see `graph_variant`.
    """

    mode: Mode
    size: int
    variant: int = 0

    def __str__(self) -> str:
        return f"{self.mode} {self.size}" + (f" (variant {self.variant})" if self.variant else "")


@dataclass(frozen=True)
class CaptureSpec:
    """How to record one shape.

    Attributes:
        run: the model's step on its fixed inputs.
        breaks: whether an op stays outside the graphs.
        keep: tensors that outlive the recording.
        state: anything else that a replay needs (a batch, a plan); stored with the graphs.
    """

    run: Callable[[], Any]
    breaks: Callable[[Any], bool]
    keep: Sequence[Tensor]
    state: Any = None


@dataclass(frozen=True)
class Captured:
    """One captured shape: its graphs, their state, the device memory that they added, and the seconds that capturing took."""

    key: GraphKey
    segments: Segments
    state: Any
    nbytes: int
    seconds: float


Prepare = Callable[[GraphKey], AbstractContextManager[CaptureSpec]]


@dataclass
class GraphSet:
    """Captures shapes into one recorder, under a budget.

    A shape that cannot be captured is skipped, with the reason in `refused`; with `strict` it raises.
    `unsafe` maps ops that turned out not to be recordable to the reason; they run between the graphs.
    `agree` combines a decision over all processes that run the model: before and after each run of a shape, and on keeping it. All must
    capture the same shapes, because all of them take part in each recorded run.
    """

    recorder: Recorder
    budget: int
    strict: bool = False
    captured: dict[GraphKey, Captured] = field(default_factory=dict)
    refused: dict[GraphKey, str] = field(default_factory=dict)
    unsafe: dict[Any, str] = field(default_factory=dict)
    nbytes: int = 0
    agree: Callable[[bool], bool] = bool

    def capture(self, keys: Sequence[GraphKey], prepare: Prepare) -> Iterator[GraphKey]:
        """Capture shapes in this order; yields each key once its shape is captured or refused.

        Raises:
            CaptureError: with `strict`, for the first shape that cannot be captured or does not fit the budget.
        """
        gc.collect()  # once, because it is slow: memory held by reference cycles must not be counted as a graph's
        before = self.recorder.bytes_in_use()
        for key in keys:
            before = self._capture(key, prepare, before)
            yield key

    def _capture(self, key: GraphKey, prepare: Prepare, before: int) -> int:
        fits = self.nbytes < self.budget
        if not self.agree(fits):
            taken = f"the graphs before it take {self.nbytes / MIB:,.0f} MiB of the {self.budget / MIB:,.0f} MiB allowed"
            self._refuse(key, IN_ANOTHER_PROCESS if fits else taken)
            return before
        started, mark = time.perf_counter(), self.recorder.mark()
        try:
            segments, state = self._record(key, prepare, mark)
        except _InAnotherProcess:
            self.recorder.rollback(mark)
            self._refuse(key, IN_ANOTHER_PROCESS)
            return self.recorder.bytes_in_use()
        except _no_graph() as error:
            self.agree(False)  # answers the other ranks' question before or after the run
            self.recorder.rollback(mark)
            self._refuse(key, first_line(error), error)
            return self.recorder.bytes_in_use()
        after = self.recorder.bytes_in_use()
        added = max(after - before, 0)
        fits = self.nbytes + added <= self.budget
        if not self.agree(fits):
            del segments, state
            self.recorder.rollback(mark)
            adds = (
                f"it would add {added / MIB:,.0f} MiB to {self.nbytes / MIB:,.0f} MiB of graphs; {self.budget / MIB:,.0f} MiB are allowed"
            )
            self._refuse(key, IN_ANOTHER_PROCESS if fits else adds)
            return self.recorder.bytes_in_use()
        self.nbytes += added
        self.captured[key] = Captured(key, segments, state, added, time.perf_counter() - started)
        return after

    def _record(self, key: GraphKey, prepare: Prepare, mark: int) -> tuple[Segments, Any]:
        """Record one shape. An op that fails to record but may break the graph runs between graphs from then on, and all processes retry.

        Raises:
            _InAnotherProcess: another process cannot continue.
        """
        while True:
            recorded: tuple[Segments, Any] | None = None
            try:
                with prepare(key) as spec:
                    self._all_go_on()
                    with self.recorder.session():
                        spec.run()  # a first run may compile, allocate or wait, which a recorded one must not
                    recorded = record(spec.run, self.recorder, lambda op: spec.breaks(op) or op in self.unsafe, spec.keep), spec.state
            except OpNotRecorded as error:
                if not may_break(error.op):
                    raise
                self.unsafe[error.op] = first_line(error.__cause__ or error)
                logger.info("%s cannot be captured and runs between the graphs: %s", error.op, self.unsafe[error.op])
            self._all_go_on()
            if self.agree(recorded is not None):
                assert recorded is not None
                return recorded
            del recorded
            self.recorder.rollback(mark)

    def _all_go_on(self) -> None:
        """Raises unless all processes can continue: every process takes part in every run."""
        if not self.agree(True):
            raise _InAnotherProcess

    def _refuse(self, key: GraphKey, reason: str, error: BaseException | None = None) -> None:
        if self.strict:
            raise CaptureError(
                f"the graph {key} cannot be captured: {reason}. Without graph_strict this shape would run uncaptured"
            ) from error
        self.refused[key] = reason
        logger.warning("graph %s is not captured: %s", key, reason)

    def sizes(self, mode: Mode) -> list[int]:
        """The captured sizes of a mode, ascending."""
        return sorted({key.size for key in self.captured if key.mode == mode})

    def clear(self) -> None:
        """Free every graph."""
        self.captured.clear()
        self.refused.clear()
        self.nbytes = 0
        self.recorder.rollback(0)


def _no_graph() -> tuple[type[Exception], ...]:
    """Errors that mean that one shape cannot be captured: from CUDA, a backend's plan, or a kernel that needs too much memory."""
    return (RuntimeError, UnsupportedError, *triton_errors())
