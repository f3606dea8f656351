"""`paged-attn bench` end to end on a tiny model, and what a user can get wrong."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paged_attn.bench import session as session_module
from paged_attn.bench import worker
from paged_attn.bench.launch import Outcome
from paged_attn.bench.systems.job import Job, Log, ModelSource, Sampling, Task
from paged_attn.bench.systems.model_source import load, save_weights, write_shape
from paged_attn.bench.systems.systems import Entry
from paged_attn.bench.workloads import Workload
from paged_attn.cli.main import main
from tests.versions import NEWEST

SMOKE = ["bench", "--smoke"]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the temporary folders of a run go."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def outcome(name: str, **more: Any) -> Outcome:
    timed = {"seconds": 1.0, "tokens_per_second": 1.0, "first_token": None, "between_tokens": None, "tokens": [[1, 2, 3, 4]]}
    return Outcome(name, {"latency 1 x 12 + 4": timed}, start_seconds=1.0, facts={"versions": {}}, **more)


@pytest.mark.slow
def test_smoke_beside_transformers(tmp_path: Path, work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, chart = tmp_path / "bench.json", tmp_path / "bench.svg"
    flags = ["--compare", "transformers,vllm", "--json", str(data), "--chart", str(chart), "--page-size", "8"]
    assert main([*SMOKE, "--workload", "mixed,prefix", *flags]) == 0
    out, err = capfd.readouterr()
    found = json.loads(data.read_text())
    systems, names = found["systems"], [workload["name"] for workload in found["workloads"]]
    assert names == ["mixed 4 x 4-20 + 4", "prefix 3 x 32+5 + 4"]
    for name in ("paged_attn", "transformers"):
        assert list(systems[name]["timed"]) == names and systems[name]["failed"] is None
        assert systems[name]["start_seconds"] > 0 and systems[name]["host_peak_bytes"] > 2**27
        for timed in systems[name]["timed"].values():
            assert timed["tokens_per_second"] == timed["new_tokens"] / timed["seconds"] and timed["runs"] == [timed["seconds"]]
            assert 0 < timed["first_token"]["p50"] <= timed["first_token"]["p99"] and timed["between_tokens"]["p50"] > 0
    # The tiny model is in float32: both give the same tokens, so that they ran the same prompts on the same weights.
    assert found["equal_tokens"]["transformers"] == {name: {"tokens": 1.0, "requests": 1.0} for name in names}
    ours, theirs = (systems[name]["timed"][names[0]]["seconds"] for name in ("paged_attn", "transformers"))
    assert found["ratios"]["transformers"][names[0]] == pytest.approx(theirs / ours)
    assert systems["paged_attn"]["facts"]["kv_pool_gib"] > 0 and found["settings"]["options"]["paged_attn"]["page_size"] == 8
    assert f"{names[0]}  " in out and "vllm: not installed; pip install vllm" in out
    assert "paged_attn: ready in" in err and "transformers: prefix 3 x 32+5 + 4:" in err
    assert chart.read_text().count("<rect") == 1 + 4 and not list(work.iterdir())


@pytest.mark.parametrize("breaks", ["nothing", "the system", "a workload"])
def test_the_output_of_what_failed_is_kept(
    breaks: str, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = []

    def launch(job, folder, note, advance, *, timeout, show_output):
        jobs.append((job, timeout, show_output))
        (folder / "transformers.log").write_text("Traceback")
        whole = outcome(job.system)
        if job.system == "transformers" and breaks == "the system":
            whole.failed = "ended with status 1"
        if job.system == "transformers" and breaks == "a workload":
            whole.broken = {"latency 1 x 12 + 4": "out of memory"}
        whole.output = str(folder / f"{job.system}.log")
        return whole

    monkeypatch.setattr(session_module, "launch", launch)
    monkeypatch.setattr(session_module, "save_weights", lambda source, folder: folder.mkdir() or source)
    flags = [
        "--save-weights",
        "--compare",
        "transformers",
        "--option",
        "transformers.seed=5",
        "--timeout",
        "99",
        "--seed",
        "4",
        "--max-seconds",
        "7",
    ]
    assert main([*SMOKE, "--workload", "latency", *flags]) == 0
    assert [folder / "transformers.log" for folder in work.iterdir()] == [
        Path(jobs[0][0].model.path).parent / "transformers.log" for _ in range(breaks != "nothing")
    ]
    assert not list(work.glob("*/weights"))
    (ours, timeout, shown), (theirs, _, _) = jobs
    assert (ours.system, theirs.system, timeout, shown) == ("paged_attn", "transformers", 99.0, False)
    assert ours.options["page_size"] == 16 and theirs.options == {"seed": 5} and (theirs.repeat, theirs.max_seconds) == (1, 7.0)
    assert ours.tasks == theirs.tasks and ours.tasks[0].prompts == ours.tasks[0].workload.prompts(256, 4)
    assert ours.model == theirs.model and ours.model.random_weights and ours.model.dtype == "float32"
    assert ("out of memory" in capsys.readouterr().out) == (breaks == "a workload")


def test_the_status_says_whether_there_is_a_comparison(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def status(*given: Outcome) -> int:
        monkeypatch.setattr(session_module.Session, "run", lambda self: list(given))
        return main([*SMOKE, "--workload", "latency"])

    def missing(name: str, why: str) -> Outcome:
        return Outcome(name, failed=why)

    ours, vllm = outcome("paged_attn"), missing("vllm", "not installed")
    assert status(ours) == 0 and status(ours, vllm, outcome("transformers")) == 0
    assert status(ours, vllm) == 1 and status(ours, vllm, missing("transformers", "broke")) == 1
    assert status(outcome("paged_attn", failed="crashed late")) == 1
    assert status(outcome("paged_attn", broken={"other": "out of memory"})) == 1
    assert "vllm: not installed" in capsys.readouterr().out


@pytest.mark.slow
def test_weights_can_be_saved_for_those_who_draw_none(tmp_path: Path) -> None:
    drawn = ModelSource(write_shape("tiny", "float32", tmp_path / "config"), True, "float32", "cpu")
    saved = save_weights(drawn, tmp_path / "weights")
    assert saved == ModelSource(str(tmp_path / "weights"), False, "float32", "cpu")
    again, first = load(saved).state_dict(), load(drawn).state_dict()
    assert first.keys() == again.keys() and all(first[name].equal(again[name]) for name in first)


def test_weights_that_could_not_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = SimpleNamespace(Process=lambda **_: SimpleNamespace(start=lambda: None, join=lambda: None, exitcode=-9))
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: failing)
    drawn = ModelSource(write_shape("tiny", "float32", tmp_path / "config"), True, "float32", "cpu")
    with pytest.raises(ChildProcessError, match="ended with status -9; its error is above"):
        save_weights(drawn, tmp_path / "weights")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=575_231))
    with pytest.raises(ValueError, match=r"take 0.0 GB on disk, and .* has 0.0 GB free; set TMPDIR to a folder with room"):
        save_weights(drawn, tmp_path / "weights")  # 575,232 bytes


@pytest.mark.parametrize(
    ("flags", "vllm", "saved"),
    [
        (["--shape", "gpt-oss-20b", "--compare", "vllm"], True, True),
        (["--shape", "gpt-oss-20b", "--compare", "transformers,vllm-transformers"], True, True),
        (["--shape", "gpt-oss-20b", "--compare", "vllm"], False, False),
        (["--shape", "gpt-oss-20b", "--compare", "vllm", "--no-save-weights"], True, False),
        (["--shape", "gpt-oss-20b", "--compare", "transformers"], True, False),
        (["--shape", "gemma-3-12b", "--compare", "vllm"], True, False),
        (["--shape", "gemma-3-12b", "--save-weights"], True, True),
        (["--model", "/some/model", "--compare", "vllm"], True, False),
    ],
)
def test_beside_vllm_experts_get_the_same_weights(flags: list[str], vllm: bool, saved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own random numbers send all tokens to the same few experts."""
    asked: list[bool] = []
    monkeypatch.setattr(Entry, "missing", lambda self, device: None if vllm or self.package != "vllm" else "not installed")
    monkeypatch.setattr(session_module.Session, "run", lambda self: asked.append(self.save_weights) or [outcome("paged_attn")])
    assert main(["bench", "--device", "cpu", "--workload", "latency", *flags]) in (0, 1)
    assert asked == [saved]


@pytest.mark.parametrize("system", ["transformers", "transformers-generate", "paged_attn"])
def test_a_checkpoint_in_this_process(system: str, model_folder: Path, tmp_path: Path) -> None:
    """Each adapter gives the tokens of plain `generate`, though one of them is the model's end token, and stamps for each in order."""
    workloads = [Workload("throughput", 2, 9, 9, 6), Workload("latency", 1, 40, 40, 3)]
    tasks = [Task(workload, workload.prompts(257, 1)) for workload in workloads]
    model = load(ModelSource(str(model_folder), False, "float32", "cpu"))
    model.generation_config.eos_token_id = None
    expected = []
    for task in tasks:
        rows = model.generate(torch.tensor(task.prompts), do_sample=False, max_new_tokens=task.workload.new, pad_token_id=0)
        expected.append(rows[:, task.workload.high :].tolist())
    model.config.eos_token_id = model.generation_config.eos_token_id = expected[0][0][1]
    model.save_pretrained(tmp_path / "model")
    options = {"compile": False, "num_pages": 32} if system == "paged_attn" else {}
    uneven = Workload("mixed", 2, 3, 9, 2)
    asked = [*tasks, Task(uneven, [[5, 6, 7], [8] * 9])]
    log = Log(tmp_path / "events")
    worker.run(Job(system, ModelSource(str(tmp_path / "model"), False, "float32", "cpu"), asked, 1, 60.0, options), log)
    events = log.new()
    timed = {event["workload"]: event for event in events if event["event"] == "timed"}
    assert [timed[workload.name]["tokens"] for workload in workloads] == expected
    assert all(0 < event["first_token"]["p50"] and 0 <= event["between_tokens"]["p50"] for event in timed.values())
    assert (uneven.name in timed) == (system != "transformers-generate")
    assert [event["workload"] for event in events if event["event"] == "skipped"] == [uneven.name] * (system == "transformers-generate")
    assert events[-1]["event"] == "done" and events[-1]["facts"]["versions"]["transformers"]
    attention = "sdpa" if NEWEST or system != "transformers" else "paged|sdpa"  # 5.17 leaves its own name in the model's config
    assert events[-1]["facts"]["attention"] == attention or system == "paged_attn"


@pytest.mark.parametrize("system", ["transformers", "transformers-generate", "paged_attn"])
def test_tokens_are_drawn_where_a_temperature_is_given(system: str, model_folder: Path, tmp_path: Path) -> None:
    workload = Workload("throughput", 4, 9, 9, 6)
    tasks = [Task(workload, [[5, 6, 7, 8, 9, 10, 11, 12, 13]] * 4)]
    options = {"compile": False, "num_pages": 32} if system == "paged_attn" else {}
    source = ModelSource(str(model_folder), False, "float32", "cpu")
    answers = {}
    for sampling in (Sampling(), Sampling(2.0), Sampling(2.0, top_k=1), Sampling(2.0, top_p=1e-6)):
        log = Log(tmp_path / str(sampling))
        worker.run(Job(system, source, tasks, 1, 60.0, options, sampling), log)
        answers[str(sampling)] = next(event["tokens"] for event in log.new() if event["event"] == "timed")
    greedy, drawn, *filtered = answers.values()
    assert filtered == [greedy, greedy] and len({tuple(row) for row in greedy}) == 1 and len({tuple(row) for row in drawn}) == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--compare", "sglang"], "--compare sglang is unknown; allowed are transformers, transformers-generate, vllm"),
        (["--workload", "speed"], "--workload speed is unknown"),
        (["--workload", ","], "--workload names none"),
        (["--requests", "2,x"], "--requests: 'x' is not a whole number of at least 1"),
        (["--requests", "0"], "--requests: '0' is not a whole number"),
        (["--input-len", "9-5"], "--input-len 9-5: the first number is larger than the second; write 5-9"),
        (["--input-len", "-5"], "--input-len: '' is not a whole number"),
        (["--output-len", "0"], "--output-len is 0; allowed are values of at least 1"),
        (["--input-len", "3000"], "needs 3,004 positions and the model has 2,048; lower --input-len"),
        (["--repeat", "0", "--scale", "smoke", "--device", "cpu"], None),
        (["--max-seconds", "nan"], "--max-seconds is nan; allowed are values of at least 0"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--json", "/no/such/folder/x.json"], "there is no folder '/no/such/folder'; make it first"),
        (["--chart", "/no/such/folder/x.svg"], "there is no folder"),
        (
            ["--option", "vllm.seed=1"],
            "--option 'vllm.seed=1': allowed is SYSTEM.NAME=VALUE with a peer that --compare asks for (none now)",
        ),
        (["--option", "vllm", "--compare", "vllm"], "allowed is SYSTEM.NAME=VALUE with a peer that --compare asks for (vllm)"),
        (["--device", "toaster"], "device 'toaster' is not a device"),
        (["--page-size", "0"], "page_size is 0"),
        (["--temperature", "-1"], "temperature: got -1.0"),
        (["--temperature", "1", "--top-p", "0"], "top_p: got 0.0"),
        (["--top-k", "5"], "--top-k changes nothing at temperature 0; give --temperature as well"),
        (["--save-weights", "--model", "/some/model"], "--save-weights is for random weights"),
        (["--model", "/some/model"], "no model could be read from '/some/model'"),
    ],
)
def test_errors_of_the_user(flags: list[str], message: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    if message is None:  # --smoke sets the repetitions
        flags, message = [*flags[2:], "--repeat", "0"], "--repeat is 0; allowed are values of at least 1"
        assert main(["bench", *flags]) == 2
    else:
        assert main([*SMOKE, *flags]) == 2
    assert message in capsys.readouterr().err


def test_options_of_peers_are_json_or_text() -> None:
    from paged_attn.cli.commands.bench import _peer_options

    given = [
        "vllm.gpu_memory_utilization=0.8",
        "vllm.kv_cache_dtype=auto",
        'vllm.compilation_config={"level": 3}',
        "vllm.enforce_eager=true",
    ]
    assert _peer_options(given, ["vllm", "transformers"]) == {
        "vllm": {"gpu_memory_utilization": 0.8, "kv_cache_dtype": "auto", "compilation_config": {"level": 3}, "enforce_eager": True},
        "transformers": {},
    }
