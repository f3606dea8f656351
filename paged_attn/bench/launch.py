"""Runs a system's worker and collects its output."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paged_attn.bench.systems.job import Job, Log

WORKER = (sys.executable, "-m", "paged_attn.bench.worker")
POLL_SECONDS = 0.1
ERROR = re.compile(r"[\w.]+(Error|Exception|Exit|Interrupt)\b")  # library notes and advice may follow it
Note = Callable[[str], None]


@dataclass
class Outcome:
    """What came of one system.

    Attributes:
        timed: workload name -> what `measure.Timed.as_dict` holds.
        skipped: workload name -> why the system does not run it.
        broken: workload name -> why it failed.
        failed: why the system did not start or ended early; None if it ended as it should.
        running: the workload that it is at.
        start_seconds: from before its imports to ready.
        output: the file with all that it wrote.
    """

    system: str
    timed: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    failed: str | None = None
    running: str | None = None
    start_seconds: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    host_peak_bytes: int | None = None
    device_bytes: int | None = None
    output: str | None = None

    @property
    def is_broken(self) -> bool:
        """Whether something failed after it started, so that its output is worth reading."""
        return self.output is not None and (self.failed is not None or bool(self.broken))

    @property
    def where(self) -> str:
        return f" in {self.running}" if self.running is not None else ""

    def take(self, event: dict[str, Any]) -> str | None:
        """Keep one event of the worker; returns what to tell the user about it."""
        kind, facts = event["event"], {name: value for name, value in event.items() if name != "event"}
        name = facts.pop("workload", "")
        if kind == "started":
            self.start_seconds, self.facts = facts["seconds"], facts["facts"]
            return f"ready in {self.start_seconds:.1f} s"
        self.running = name if kind == "running" else None
        if kind == "running":
            return None
        if kind == "timed":
            self.timed[name] = facts
            return f"{name}: {facts['seconds']:.3f} s, {facts['tokens_per_second']:,.1f} tokens/s"
        if kind in ("skipped", "failed"):
            (self.skipped if kind == "skipped" else self.broken)[name] = facts["why"]
            return f"{name}: {facts['why']}"
        assert kind == "done", kind
        self.facts, self.host_peak_bytes, self.device_bytes = facts["facts"], facts["host_peak_bytes"], facts["device_bytes"]
        return None


def launch(
    job: Job,
    folder: Path,
    note: Note,
    advance: Callable[[], object],
    *,
    timeout: float,
    show_output: bool = False,
    worker: Sequence[str] = WORKER,
) -> Outcome:
    """Run a job to its end in a process group of its own, of which nothing is left afterwards, even if this process is killed: a worker
    ends its group when its stdin ends (`end_with_parent`).

    Args:
        note, advance: are called with a line on what happened, and after each workload.
        folder: for the job, the events and the output, which are named after the system.
        timeout: seconds after which the system is ended; what it had measured counts.
        show_output: let it write to this process's stderr instead of a file.
        worker: the command; the job's file and the events' are added.
    """
    job_file, log = folder / f"{job.system}.job.json", Log(folder / f"{job.system}.events.jsonl")
    job.write(job_file)
    outcome = Outcome(job.system)
    output = folder / f"{job.system}.log"
    command = [*worker, str(job_file), str(log.path)]
    with contextlib.ExitStack() as stack:
        sink = sys.stderr.fileno() if show_output else stack.enter_context(output.open("wb"))
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sink, stderr=sink, start_new_session=True)
        process = stack.enter_context(_group(started))
        ends = time.monotonic() + timeout
        while True:
            ended = process.poll() is not None
            for event in log.new():
                if (told := outcome.take(event)) is not None:
                    note(told)
                if event["event"] in ("timed", "skipped", "failed"):
                    advance()
            if ended:
                break
            if time.monotonic() > ends:
                outcome.failed = f"not done after {timeout:g} s, and was ended{outcome.where} (see --timeout)"
                break
            time.sleep(POLL_SECONDS)
    if outcome.failed is None and process.returncode != 0:
        outcome.failed = f"ended{outcome.where} with {_reason(process.returncode, None if show_output else output)}"
    outcome.output = None if show_output else str(output)
    return outcome


@contextlib.contextmanager
def _group(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Ends what is left of the process and its children: an engine that outlives its parent would keep the GPU's memory."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _reason(status: int, output: Path | None) -> str:
    """The error of the traceback that it wrote last, or else its last line."""
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    if output is None:
        return f"{how}; its output is above"
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if ERROR.match(line)]
    return f"{how}: {(errors or lines or ['it wrote nothing'])[-1]} ({output})"
