"""Processes that compile kernels (`compile_worker.py`), and threads of this one that hand them jobs."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from subprocess import PIPE
from typing import IO

from paged_attn.backends.compiling.compile_worker import DONE

WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))  # Inductor starts at least as many
IDLE_SECONDS = 60.0  # a starting engine asks several times, also after it has read weights
COMMAND = (sys.executable, "-m", "paged_attn.backends.compiling.compile_worker")

Jobs = list[tuple[bytes, "Future[None]"]]  # pickled jobs, with the futures that wait for them


class Workers:
    """Up to WORKERS processes; each ends after `idle_seconds` without a job, or with this process."""

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        self.idle_seconds = idle_seconds
        self._jobs: queue.SimpleQueue[tuple[bytes, Future[None]]] = queue.SimpleQueue()
        self._running, self._lock = 0, threading.Lock()

    def start(self) -> None:
        """Starts all of them, so that they are ready when there are jobs."""
        with self._lock:
            self._start(WORKERS)

    def compile(self, jobs: Jobs) -> None:
        with self._lock:
            for job in jobs:
                self._jobs.put(job)
            self._start(self._running + len(jobs))

    def _start(self, wanted: int) -> None:
        more = min(WORKERS, wanted) - self._running
        for _ in range(more):
            self._running += 1
            threading.Thread(target=self._serve, name="compile_ahead", daemon=True).start()

    def _serve(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        while True:
            try:
                with (
                    tempfile.TemporaryFile() as errors,
                    subprocess.Popen(COMMAND, bufsize=0, stdin=PIPE, stdout=PIPE, stderr=errors, env=environment) as worker,
                ):
                    while self._has_compiled(worker, errors):
                        pass
            except OSError as error:  # the process cannot be started
                while (job := self._next(0)) is not None:
                    job[1].set_exception(error)
            if self._ends():
                return

    def _ends(self) -> bool:
        with self._lock:
            ends = self._jobs.empty()
            self._running -= ends
        return ends

    def _has_compiled(self, worker: subprocess.Popen[bytes], errors: IO[bytes]) -> bool:
        """Has the worker compile one more job; False if there is none, or the worker ended."""
        if (job := self._next(self.idle_seconds)) is None:
            return False
        assert worker.stdin is not None and worker.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(job[0])
        if worker.stdout.read(1) == DONE:
            job[1].set_result(None)
            return True
        errors.seek(0)
        job[1].set_exception(RuntimeError(*errors.read().decode(errors="replace").strip().splitlines()[-1:]))
        return False

    def _next(self, seconds: float) -> tuple[bytes, Future[None]] | None:
        try:
            return self._jobs.get(timeout=seconds)
        except queue.Empty:
            return None
