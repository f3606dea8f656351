"""Several shapes and systems on the same weights: all start at once, and then each is measured alone, one after the other.

    python benchmarks/beside.py /dev/shm/w bamba-9b:16 deepseek-v2-lite:14 --systems vllm,paged_attn --json out.json \
        --set vllm.kv_cache_memory_bytes=8000000000 --set paged_attn.kv_memory_gib=8

`paged-attn bench` starts a system when the one before it is done, which is right for the seconds of a start and slow: hybrid models take
vLLM three minutes each. Here seconds to ready are of a machine that starts several systems. All of them must fit in memory together: what
a system gives away is its pool of KV, which `--set` names, nothing else. The others are stopped while one is measured (SIGSTOP): they
hold memory, and take no core. With `--alone` each starts when the one before it has ended, as in `paged-attn bench`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from paged_attn.bench import worker
from paged_attn.bench.launch import Outcome, launch
from paged_attn.bench.systems.job import Job, Log, ModelSource, Task
from paged_attn.bench.systems.model_source import save_weights, text_config, write_shape
from paged_attn.bench.workloads import Workload, chosen

CONTINUE_SECONDS = 0.2


class Turn(Log):
    """After `started` it stops its processes until `begin`."""

    @property
    def _go(self) -> Path:
        return self.path.with_suffix(".go")

    @property
    def _group(self) -> Path:
        return self.path.with_suffix(".group")

    def write(self, event: str, **facts: Any) -> None:
        if event == "started":
            self._group.write_text(str(os.getpgid(0)))
        super().write(event, **facts)
        while event == "started" and not self._go.exists():
            os.killpg(0, signal.SIGSTOP)

    def begin(self) -> None:
        self._go.touch()

    def proceed(self) -> None:
        """Let them go on, if they have not ended; once may be before they stop."""
        if self._group.exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(self._group.read_text()), signal.SIGCONT)


class Run:
    """One system on one shape, in a process of its own and a thread that reads what it says."""

    def __init__(self, name: str, job: Job, folder: Path, timeout: float) -> None:
        folder.mkdir()
        self.name, self.log, self.outcome = name, Turn(folder / f"{job.system}.events.jsonl"), Outcome(job.system)
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(job, folder, timeout))
        self._thread.start()

    def _run(self, job: Job, folder: Path, timeout: float) -> None:
        command = (sys.executable, __file__, "--worker")
        self.outcome = launch(job, folder, self._note, lambda: None, timeout=timeout, worker=command)
        if self.outcome.failed is not None:
            self._note(f"failed: {self.outcome.failed}; {self.outcome.output}")
        self.ready.set()

    def _note(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self.name}: {text}", flush=True)
        self.ready.set()

    def measure(self) -> Outcome:
        self.log.begin()
        while self._thread.is_alive():
            self.log.proceed()
            self._thread.join(CONTINUE_SECONDS)
        return self.outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="a folder for them; what is there is not written again")
    parser.add_argument("shapes", nargs="+", help="SHAPE or SHAPE:LAYERS of `paged-attn bench`")
    parser.add_argument("--systems", default="vllm,paged_attn", help="in the order in which they are measured; none: write weights only")
    parser.add_argument("--alone", action="store_true", help="one system after the other; their memory need not fit together")
    parser.add_argument("--workload", default="latency,throughput,mixed,long")
    parser.add_argument("--scale", default="full")
    parser.add_argument("--mixed-requests", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=580)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--set", action="append", default=[], help="a system's setting: SYSTEM.NAME=JSON")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    options: dict[str, dict[str, Any]] = {}
    for item in asked.set:
        name, _, value = item.partition("=")
        system, _, setting = name.partition(".")
        options.setdefault(system, {})[setting] = json.loads(value)

    sources = {shape: saved(shape, asked.weights, asked.dtype, asked.device) for shape in asked.shapes}
    systems = [name for name in asked.systems.split(",") if name and name != "none"]
    folder = Path(tempfile.mkdtemp(prefix="paged_attn_beside_"))
    found: dict[str, Any] = {}

    def measure(run: Run) -> None:
        run.ready.wait()
        found[run.name] = vars(run.measure())
        if asked.json is not None:
            asked.json.write_text(json.dumps(found, indent=1))

    runs = []
    for shape, source in sources.items():
        tasks = tasks_of(source, workloads(asked.scale, asked.workload.split(","), asked.mixed_requests))
        for system in systems:
            job = Job(system, source, tasks, asked.repeat, 60.0, options.get(system, {}))
            runs.append(Run(f"{shape} {system}", job, folder / f"{shape.replace(':', '_')}.{system}", asked.timeout))
            if asked.alone:
                measure(runs.pop())
    for run in runs:
        run.ready.wait()
    for run in runs:
        measure(run)
    print("done; what they wrote is in", folder, flush=True)
    for shape in sources:
        compare(shape, [found[f"{shape} {system}"] for system in systems])


def workloads(scale: str, groups: list[str], mixed: int) -> list[Workload]:
    found = []
    for group in groups:
        found += chosen(scale, [group], requests=[mixed] if group == "mixed" and scale == "full" else None)
    return found


def saved(shape: str, weights: Path, dtype: str, device: str) -> ModelSource:
    """The shape's weights, written once."""
    folder = weights / shape.replace(":", "_")
    if (folder / "config.json").exists():
        return ModelSource(str(folder), False, dtype, device)
    name, _, layers = shape.partition(":")
    with tempfile.TemporaryDirectory() as config:
        source = ModelSource(write_shape(name, dtype, Path(config), int(layers) if layers else None), True, dtype, device)
        begun = time.perf_counter()
        unfinished = folder.with_suffix(".part")
        found = save_weights(source, unfinished)
        unfinished.rename(folder)
        print(f"{shape}: weights in {time.perf_counter() - begun:.0f} s", flush=True)
    return ModelSource(str(folder), False, found.dtype, found.device)


def tasks_of(source: ModelSource, work: list[Workload]) -> list[Task]:
    config = text_config(source.path)
    fitting = [workload for workload in work if workload.longest <= config.max_position_embeddings]
    return [Task(workload, workload.prompts(config.vocab_size, 0)) for workload in fitting]


def compare(shape: str, outcomes: list[dict[str, Any]]) -> None:
    for name in dict.fromkeys(name for outcome in outcomes for name in outcome["timed"]):
        rows = [outcome["timed"].get(name, {}) for outcome in outcomes]
        shown = [f"{row['tokens_per_second']:,.1f} ({row['seconds']:.3f} s)" if row else "-" for row in rows]
        speeds = [row.get("tokens_per_second", 0.0) for row in rows]
        ratio = f"{speeds[-1] / speeds[0]:.3f}" if len(speeds) > 1 and speeds[0] else ""
        print(f"{shape:24} {name:34} {'  '.join(shown)}  {ratio}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker.end_with_parent()
        worker.run(Job.read(Path(sys.argv[2])), Turn(Path(sys.argv[3])))
    else:
        main()
