"""What a round must not leave behind in the process: threads, files, child processes, engines, memory."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import multiprocessing
import os
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from paged_attn.engine.engine import Engine
from paged_attn.engine.requests.request import Request
from tests.capture.tape import Tape

MIB = 2**20
MAX_GROWTH_MIB = 48.0  # of memory over a whole run, once every kind of round was seen
# Dynamo keeps the guards of every trace, and its symbols with them, as long as the types and modules live that it looked at.
TRACE_MIB = 4.0
WARM_ROUNDS = 24
STAY = ("tqdm_monitor",)  # a thread that a library makes once and keeps


@dataclass(frozen=True)
class Footprint:
    """threads: Python's, by name. tasks: the kernel's. files: open descriptors, as links. rss: bytes."""

    threads: tuple[str, ...]
    tasks: int
    files: tuple[str, ...]
    children: int
    rss: int

    @classmethod
    def now(cls) -> Footprint:
        here = Path("/proc/self")
        files = sorted(link for path in (here / "fd").iterdir() if (link := _target(path)))
        rss = int((here / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        threads = tuple(sorted(thread.name for thread in threading.enumerate() if thread.name not in STAY))
        children = len((here / "task" / str(os.getpid()) / "children").read_text().split()) + len(multiprocessing.active_children())
        return cls(threads, len(list((here / "task").iterdir())), tuple(files), children, rss)


def _target(path: Path) -> str:
    try:
        kind = os.readlink(path)
    except FileNotFoundError:  # the folder's own descriptor
        return ""
    return "" if kind.startswith("/proc/") else kind.partition(":")[0]


def _give_back_freed_memory() -> None:
    """To the system, so that it does not count."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"))
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


class Watch:
    """Around one round: engines, requests and tapes made inside must be gone after it, threads, files and children as many as before.

    Args:
        warm: a round of this kind ran before in this process, so that nothing that stays for good, such as a thread pool of a library,
            is made any more.
    """

    def __init__(self, warm: bool) -> None:
        self.warm = warm
        self._made: list[tuple[str, weakref.ref[Any]]] = []
        self._patches = [mock.patch.object(kind, "__init__", self._watching(kind)) for kind in (Engine, Request, Tape)]

    def __enter__(self) -> Watch:
        gc.collect()
        self.before = Footprint.now()
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for patch in self._patches:
            patch.stop()
        if error is None:
            self._check()

    def _check(self) -> None:
        after = self._settled()
        alive = sorted({kind for kind, made in self._made if made() is not None})
        assert not alive, f"still alive after the round: {', '.join(f'{self._count(kind)} of {kind}' for kind in alive)}"
        assert after.threads == self.before.threads, f"threads before {self.before.threads}, after {after.threads}"
        assert after.children == self.before.children, f"child processes before {self.before.children}, after {after.children}"
        if self.warm:
            assert after.tasks <= self.before.tasks, f"the process had {self.before.tasks} threads, now {after.tasks}"
            assert after.files == self.before.files, f"files before {self.before.files}, after {after.files}"

    def _settled(self) -> Footprint:
        """Threads of the kernel end a moment after Python's."""
        gc.collect()
        after = Footprint.now()
        for _ in range(20):
            if after.tasks <= self.before.tasks and after.files == self.before.files and after.children == self.before.children:
                break
            time.sleep(0.05)
            after = Footprint.now()
        return after

    def _count(self, kind: str) -> int:
        return sum(name == kind and made() is not None for name, made in self._made)

    def _watching(self, kind: type) -> Any:
        init = kind.__init__  # type: ignore[misc]

        def watched(made: Any, *args: Any, **settings: Any) -> None:
            self._made.append((kind.__name__, weakref.ref(made)))
            init(made, *args, **settings)

        return watched


class Memory:
    """The process's memory, round by round; after WARM_ROUNDS rounds it may not grow by more than MAX_GROWTH_MIB, and TRACE_MIB for each
    round that traced a model."""

    def __init__(self) -> None:
        self.mib: list[float] = []
        self.traces = 0

    def note(self, traced: bool) -> float:
        gc.collect()
        self.traces += traced and len(self.mib) >= WARM_ROUNDS
        _give_back_freed_memory()
        self.mib.append(Footprint.now().rss / MIB)
        return self.mib[-1]

    @property
    def growth(self) -> float | None:
        """From the largest of the warming rounds to the least of the last three; None while it is too early to tell."""
        if len(self.mib) < WARM_ROUNDS + 3:
            return None
        return min(self.mib[-3:]) - max(self.mib[:WARM_ROUNDS])

    def check(self) -> None:
        growth, allowed = self.growth, MAX_GROWTH_MIB + TRACE_MIB * self.traces
        assert growth is None or growth <= allowed, (
            f"memory grew by {growth:.0f} MiB after the first {WARM_ROUNDS} rounds; allowed are {allowed:.0f}: {MAX_GROWTH_MIB:.0f}, and "
            f"{TRACE_MIB:.0f} for each of {self.traces} traces. By round: {' '.join(f'{mib:.0f}' for mib in self.mib)}"
        )
