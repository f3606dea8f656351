"""The worker of `paged-attn bench`, the process around it, and vLLM's adapter, with a fake in vLLM's place."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paged_attn.bench import machine, worker
from paged_attn.bench.launch import Outcome, launch
from paged_attn.bench.systems.job import Job, Log, ModelSource, Sampling, Task
from paged_attn.bench.workloads import Workload

FAKE_VLLM = Path(__file__).parent / "fake_vllm"
EVEN = Workload("throughput", 2, 5, 5, 3)


def job(system: str = "vllm", tasks: list[Workload] | None = None, **options: Any) -> Job:
    listed = [Task(workload, workload.prompts(50, 0)) for workload in tasks or [EVEN]]
    return Job(system, ModelSource("/some/model", True, "bfloat16", "cpu"), listed, 2, 60.0, options)


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(f"import json, os, sys, time\ndef say(**e):\n    open(sys.argv[2], 'a').write(json.dumps(e) + chr(10))\n{text}\n")
    return [sys.executable, str(path)]


TIMED = {"event": "timed", "workload": "w", "seconds": 2.0, "tokens_per_second": 5.0}


def run_script(tmp_path: Path, text: str, timeout: float = 60.0) -> tuple[Outcome, list[str], int]:
    notes: list[str] = []
    advanced: list[int] = []
    outcome = launch(job(), tmp_path, notes.append, lambda: advanced.append(1), timeout=timeout, worker=script(tmp_path, text))
    return outcome, notes, len(advanced)


def test_a_worker_is_followed_to_its_end(tmp_path: Path) -> None:
    started = "say(event='started', seconds=1.5, facts={'versions': {}})"
    done = "say(event='done', facts={'versions': {'a': '1'}}, host_peak_bytes=7, device_bytes=None)"
    text = f"assert json.load(open(sys.argv[1]))['system'] == 'vllm'\n{started}\nsay(event='running', workload='w')\nsay(**{TIMED!r})\n"
    outcome, notes, advanced = run_script(tmp_path, text + f"say(event='skipped', workload='x', why='no')\n{done}")
    assert outcome.failed is None and not outcome.is_broken and outcome.start_seconds == 1.5 and outcome.facts["versions"] == {"a": "1"}
    assert (
        outcome.timed == {"w": {"seconds": 2.0, "tokens_per_second": 5.0}}
        and outcome.skipped == {"x": "no"}
        and outcome.host_peak_bytes == 7
    )
    assert notes == ["ready in 1.5 s", "w: 2.000 s, 5.0 tokens/s", "x: no"] and advanced == 2


def test_a_crash_is_told_with_its_error_and_what_was_timed_counts(tmp_path: Path) -> None:
    text = (
        f"say(**{TIMED!r})\nprint('noise', file=sys.stderr)\ntry:\n    [][3]\nfinally:\n    import atexit; atexit.register(print, 'advice')"
    )
    outcome, _, _ = run_script(tmp_path, text)
    assert outcome.failed == f"ended with status 1: IndexError: list index out of range ({tmp_path / 'vllm.log'})"
    assert outcome.is_broken and list(outcome.timed) == ["w"]
    text = "say(event='running', workload='long')\nprint('out of luck', flush=True)\nos.kill(os.getpid(), 9)"
    assert str(run_script(tmp_path, text)[0].failed).startswith("ended in long with signal SIGKILL: out of luck (")


def test_a_hung_worker_is_ended_with_its_children(tmp_path: Path) -> None:
    child = "import subprocess\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    text = f"{child}\nsay(**{TIMED!r})\nsay(event='running', workload='x')\ntime.sleep(60)"
    outcome, _, _ = run_script(tmp_path, text, timeout=1.0)
    assert outcome.failed == "not done after 1 s, and was ended in x (see --timeout)" and list(outcome.timed) == ["w"]
    stat = Path(f"/proc/{(tmp_path / 'vllm.log').read_text().strip()}/stat")
    ends = time.monotonic() + 5
    while alive(stat) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not alive(stat)


def test_nothing_outlives_a_bench_that_is_killed(tmp_path: Path) -> None:
    """An engine would keep the GPU's memory."""
    work = """from paged_attn.bench.worker import end_with_parent
import subprocess
end_with_parent()
child = subprocess.Popen(['sleep', '60'])
print(os.getpid(), child.pid, flush=True)
time.sleep(60)"""
    bench = tmp_path / "bench.py"
    bench.write_text(
        "import sys\nfrom pathlib import Path\nfrom paged_attn.bench.launch import launch\nfrom paged_attn.bench.systems.job import Job\n"
        f"worker, folder = {script(tmp_path, work)!r}, Path({str(tmp_path)!r})\n"
        "launch(Job.read(folder / 'asked'), folder, print, print, timeout=60, worker=worker)\n"
    )
    job().write(tmp_path / "asked")
    process, output = subprocess.Popen([sys.executable, str(bench)]), tmp_path / "vllm.log"
    ends = time.monotonic() + 30
    while (not output.exists() or not output.read_text()) and time.monotonic() < ends:
        time.sleep(0.05)
    stats = [Path(f"/proc/{pid}/stat") for pid in output.read_text().split()]
    assert len(stats) == 2 and all(map(alive, stats))
    process.kill()
    process.wait()
    ends = time.monotonic() + 5
    while any(map(alive, stats)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not any(map(alive, stats))


def alive(stat: Path) -> bool:
    """A killed process may wait for its parent as a zombie."""
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")


def test_events_are_read_when_they_are_whole(tmp_path: Path) -> None:
    log = Log(tmp_path / "events")
    assert log.new() == []
    log.write("ä", n=1)
    with log.path.open("a") as file:
        file.write('{"event": "half')
    assert log.new() == [{"event": "ä", "n": 1}] and log.new() == []
    with log.path.open("a") as file:
        file.write('"}\n')
    assert log.new() == [{"event": "half"}]


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    asked = replace(job(tasks=[EVEN, Workload("prefix", 2, 3, 4, 5, 6)], some="option"), sampling=Sampling(0.5, 0.9, 7))
    asked.write(tmp_path / "job")
    assert Job.read(tmp_path / "job") == asked and asked.longest == 15


def test_memory_of_the_device_is_that_of_the_visible_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.host_peak_bytes() > 50 * 2**20 and machine.device_used_bytes("cpu") is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa, 100'\necho '1, GPU-bb, 300'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [machine.device_used_bytes(name) for name in ("cuda", "cuda:1")] == [100 * 2**20, 300 * 2**20]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.device_used_bytes("cuda:0") == 300 * 2**20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa")
    assert machine.device_used_bytes("cuda") == 100 * 2**20
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    tool.write_text("#!/bin/sh\necho 'no driver' >&2\nexit 9\n")
    assert machine.device_used_bytes("cuda") is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert machine.device_used_bytes("cuda") is None


# vLLM


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FAKE_VLLM))
    yield __import__("vllm")
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def run_worker(tmp_path: Path, asked: Job) -> dict[str, list[dict[str, Any]]]:
    log = Log(tmp_path / "events")
    worker.run(asked, log)
    events: dict[str, list[dict[str, Any]]] = {}
    for event in log.new():
        events.setdefault(event["event"], []).append(event)
    return events


def test_vllm_is_asked_for_the_same_work(tmp_path: Path, vllm: Any) -> None:
    prefix = Workload("prefix", 3, 2, 4, 5, shared=6)
    events = run_worker(tmp_path, job("vllm", [EVEN, prefix], gpu_memory_utilization=0.7, max_model_len=99))
    assert vllm.LLM.made == {
        "model": "/some/model", "dtype": "bfloat16", "model_impl": "auto", "max_model_len": 99, "load_format": "dummy", "seed": 0,
        "skip_tokenizer_init": True, "enable_prefix_caching": True, "gpu_memory_utilization": 0.7,
    }  # fmt: skip
    assert events["started"][0]["facts"]["versions"]["vllm"] == "0.20.2" and "failed" not in events
    assert [event["new_tokens"] for event in events["timed"]] == [6, 15]
    for event, workload in zip(events["timed"], (EVEN, prefix), strict=True):
        expected = [vllm.answer(prompt, workload.new) for prompt in workload.prompts(50, 0)]
        assert event["tokens"] == expected and event["first_token"]["p50"] > 0 and event["between_tokens"]["p99"] > 0
    # Each of warm-up, two repetitions and the stamped run begins with an empty prefix cache, and asks for the same tokens.
    assert vllm.LLM.resets == 8
    assert all((p.temperature, p.ignore_eos, p.detokenize) == (0.0, True, False) for p in vllm.LLM.params)
    assert {p.max_tokens for p in vllm.LLM.params} == {3, 5}


def test_vllm_draws_as_it_is_told(tmp_path: Path, vllm: Any) -> None:
    run_worker(tmp_path, replace(job("vllm"), sampling=Sampling(0.7, top_p=0.9)))
    assert {(p.temperature, p.top_p, p.top_k, p.ignore_eos) for p in vllm.LLM.params} == {(0.7, 0.9, 0, True)}


def test_vllm_with_its_transformers_backend_and_real_weights(tmp_path: Path, vllm: Any) -> None:
    saved = replace(job("vllm-transformers"), model=ModelSource("/saved", False, "auto", "cuda"))
    run_worker(tmp_path, saved)
    assert vllm.LLM.made["model_impl"] == "transformers" and vllm.LLM.made["load_format"] == "auto" and vllm.LLM.made["max_model_len"] == 8


def test_vllm_that_keeps_its_prefix_cache_is_not_timed(tmp_path: Path, vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.LLM, "reset_prefix_cache", lambda self: False)
    events = run_worker(tmp_path, job("vllm"))
    assert "did not empty its prefix cache" in events["failed"][0]["why"] and "timed" not in events
    assert "timed" in run_worker(tmp_path, job("vllm", enable_prefix_caching=False))


def test_one_workload_that_fails_does_not_end_the_others(tmp_path: Path, vllm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    long = Workload("long", 1, 30, 30, 1)
    events = run_worker(tmp_path, job("vllm", [long, EVEN], fail_beyond=20))
    assert [event["workload"] for event in events["failed"]] == [long.name] and [e["workload"] for e in events["timed"]] == [EVEN.name]
    assert "fake out of memory" in events["failed"][0]["why"] and "Traceback" in capsys.readouterr().err
