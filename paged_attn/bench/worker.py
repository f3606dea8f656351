"""Runs one system in a process of its own: `python -m paged_attn.bench.worker JOB LOG`. Events are written to LOG as they happen."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from paged_attn.bench.machine import device_used_bytes, host_peak_bytes
from paged_attn.bench.measure import measure
from paged_attn.bench.systems.job import Job, Log
from paged_attn.bench.systems.systems import SYSTEMS


def run(job: Job, log: Log) -> None:
    """Start the system, run the tasks that it can, and say what came of each."""
    entry = SYSTEMS[job.system]
    before = device_used_bytes(job.model.device)
    started = time.perf_counter()
    system = entry.start(job)
    log.write("started", seconds=time.perf_counter() - started, facts=system.facts())
    for task in job.tasks:
        name = task.workload.name
        if why := entry.refuses(task.workload):
            log.write("skipped", workload=name, why=why)
            continue
        log.write("running", workload=name)
        try:
            timed = measure(system, task, job.repeat, job.max_seconds, job.system)
        except (RuntimeError, ValueError) as error:  # out of memory, say; the next workload may fit
            traceback.print_exc()
            log.write("failed", workload=name, why=f"{type(error).__name__}: {error}")
        else:
            log.write("timed", workload=name, **timed.as_dict())
    after = device_used_bytes(job.model.device)
    used = None if after is None or before is None else after - before
    log.write("done", facts=system.facts(), host_peak_bytes=host_peak_bytes(), device_bytes=used)
    system.close()


def end_with_parent() -> None:
    """From now on this process and its children are killed when `launch`, which made a group of them, is gone, and its end of stdin."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os.killpg(0, signal.SIGKILL)

    if os.getpgid(0) != os.getpid():  # started by hand, in another process group
        return
    threading.Thread(target=wait, name="end_with_parent", daemon=True).start()


def main(argv: Sequence[str]) -> None:
    end_with_parent()
    run(Job.read(Path(argv[0])), Log(Path(argv[1])))


if __name__ == "__main__":
    main(sys.argv[1:])
