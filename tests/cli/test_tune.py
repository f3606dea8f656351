"""`paged-attn tune`: with a fake clock for what it measures, prints and writes, and with the real one on this CPU."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from paged_attn.backends.selection.requirements import Requirements
from paged_attn.backends.selection.select import select
from paged_attn.backends.timing import time_backends
from paged_attn.backends.timing.time_backends import Timing
from paged_attn.cli.commands import tune
from paged_attn.cli.commands.tune import Step
from paged_attn.cli.main import main
from tests.backends.fake_backends import Machine, machine

__all__ = ["machine"]
NAN = float("nan")


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGED_ATTN_TUNED", str(tmp_path / "tuned.json"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path / "tuned.json"


class Clock:
    """In place of `time_backends`: microseconds by backend and kind of step, or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **times: dict[str, float | str]) -> None:
        self.times, self.calls = times, []
        monkeypatch.setattr(time_backends, "time_backends", self)

    def __call__(self, backends, problem, *, min_ms, device):
        self.calls.append((list(backends), problem, min_ms, device))
        found = {name: self.times[problem.kind][name] for name in backends}
        return {n: Timing(NAN, NAN, NAN, t) if isinstance(t, str) else Timing(t, 1.0, 1.0) for n, t in found.items()}


@pytest.fixture
def gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch, path: Path) -> Machine:
    """Two backends for both phases and one for decode; all else is missing."""
    monkeypatch.setenv("PAGED_ATTN_TUNED", str(path))
    for name in ("flashinfer", "flash_attn", "torch_varlen", "flex", "torch_native"):
        machine.lacks(name)
    machine.put("trtllm_mha", phases=frozenset({"decode"}))
    monkeypatch.setattr(tune, "conditions", lambda device: {"driver": "580.1"})
    monkeypatch.setattr("paged_attn.backends.devices.device_name", lambda device: "Test GPU")
    return machine


FAST = {"prefill": {"fa3": 10.0, "triton": 20.0}, "decode": {"fa3": 40.0, "triton": 30.0, "trtllm_mha": 60.0}}


def test_it_times_what_fits_prints_a_table_and_writes_what_auto_then_goes_by(
    gpu: Machine, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch, **FAST)
    assert main(["tune", "--dtype", "bfloat16", "--decode", "8x64", "--decode", "2x128", "--prefill", "2x16x48", "--min-ms", "5"]) == 0
    assert [(sorted(names), problem.kind, problem.requests) for names, problem, _, _ in clock.calls] == [
        (["fa3", "triton"], "prefill", ((32, 16),) * 2),
        (["fa3", "triton", "trtllm_mha"], "decode", ((63, 1),) * 8),
        (["fa3", "triton", "trtllm_mha"], "decode", ((127, 1),) * 2),
    ]
    _, problem, min_ms, device = clock.calls[0]
    spec = problem.spec
    assert (spec.num_q_heads, spec.num_kv_heads, spec.qk_head_dim, spec.v_head_dim, spec.scale) == (32, 8, 128, 128, 128**-0.5)
    assert (problem.page_size, problem.dtype, min_ms, device) == (16, torch.bfloat16, 5.0, torch.device("cpu"))
    out, err = capsys.readouterr()
    assert "Test GPU: 32 heads over 8 KV, dim 128" in out and "without flashinfer: no_flashinfer 2.0 is not installed" in out
    assert "fa4" not in out and "reference" not in out
    cells = {" ".join(line.split()) for line in out.splitlines()}
    assert {"us per layer fa3 triton trtllm_mha", "prefill 2x16x48 10.0* 20.0 -", "decode 8x64 40.0 30.0* 60.0"} <= cells
    assert {"prefill: fa3 1.00, triton 2.00", "decode: triton 1.00, fa3 1.33, trtllm_mha 2.00"} <= cells
    assert f"written to {path}\nbackend='auto' now takes fa3,triton for such layers (" in out
    assert err.splitlines()[0] == "[1/3] prefill 2x16x48: fa3, triton"
    data = json.loads(path.read_text())
    (entry,) = data["entries"]
    assert data["device"] == "Test GPU" and entry["conditions"]["driver"] == "580.1" and entry["conditions"]["min_ms"] == 5.0
    assert entry["microseconds"]["decode"]["2x128"] == {"fa3": 40.0, "triton": 30.0, "trtllm_mha": 60.0}
    assert entry["ranking"]["decode"] == {"triton": 1.0, "fa3": 1.3333, "trtllm_mha": 2.0}
    taken = gpu.take()
    assert taken.backend.name == "fa3,triton" and f"measured on {entry['date']}, {path}" in taken.reason


def test_failures_are_shown_and_left_out_of_the_ranking(
    gpu: Machine, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Clock(monkeypatch, prefill={"fa3": "RuntimeError: boom", "triton": 20.0}, decode=FAST["decode"])
    assert main(["tune", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "prefill 1x64x64, fa3: RuntimeError: boom" in out and "prefill: triton 1.00\n" in out
    assert gpu.take().backend.name == "triton"


def test_nothing_is_written_if_a_phase_has_none(
    gpu: Machine, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Clock(monkeypatch, prefill=dict.fromkeys(("fa3", "triton"), "no"), decode=FAST["decode"])
    assert main(["tune", "--dtype", "bfloat16"]) == 1
    assert "nothing was written" in capsys.readouterr().err and not path.exists()


def test_inputs_that_do_not_fit_in_memory_end_that_shape_only(
    gpu: Machine, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch, **FAST)

    def short(backends, problem, **keywords):
        if problem.requests[0][1] == 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return clock(backends, problem, **keywords)

    monkeypatch.setattr(time_backends, "time_backends", short)
    assert main(["tune", "--dtype", "bfloat16"]) == 1
    assert "prefill 1x64x64, triton: the inputs do not fit in memory: CUDA out of memory" in capsys.readouterr().out


def test_named_backends_and_another_file(
    gpu: Machine, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch, **FAST)
    other = tmp_path / "other.json"
    assert main(["tune", "--dtype", "bfloat16", "--backend", "fa3", "--out", str(other)]) == 0
    assert {tuple(names) for names, *_ in clock.calls} == {("fa3",)} and other.exists() and not path.exists()
    assert f"set PAGED_ATTN_TUNED={other} for backend='auto' to use it" in capsys.readouterr().out
    assert main(["tune", "--dtype", "bfloat16", "--backend", "fa3", "--backend", "flashinfer"]) == 2
    error = capsys.readouterr().err
    assert "not every backend asked for can be timed here:\n  flashinfer: no_flashinfer 2.0 is not installed" in error
    assert main(["tune", "--backend", "fa9"]) == 2
    assert "unknown attention backend 'fa9'" in capsys.readouterr().err


def test_deterministic_kernels_are_timed_as_such(gpu: Machine, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_attn.backends.attention.capabilities import Feature
    from tests.backends.fake_backends import PLAIN

    gpu.put("triton", features=PLAIN.features | {Feature.DETERMINISTIC})
    made = []
    clock = Clock(monkeypatch, **FAST)
    monkeypatch.setattr(
        time_backends, "time_backends", lambda backends, *a, **k: made.extend(backends.values()) or clock(backends, *a, **k)
    )
    assert main(["tune", "--dtype", "bfloat16", "--deterministic"]) == 0
    assert {(each.name, each.deterministic) for each in made} == {("triton", True)}
    assert json.loads(path.read_text())["entries"][0]["kind"]["deterministic"] is True


def test_what_can_not_be_loaded_is_left_out(gpu: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.put("fa3", error=ImportError("undefined symbol"))
    Clock(monkeypatch, **FAST)
    assert main(["tune", "--dtype", "bfloat16"]) == 0
    assert "without fa3: it fits, but cannot be loaded: undefined symbol" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--decode", "8"], "--decode '8' is not a step; allowed are numbers as in 64x4096"),
        (["--decode", "8x1"], "--decode '8x1' is not a step"),
        (["--decode", "0x8"], "--decode '0x8' is not a step"),
        (["--prefill", "1x9x8"], "--prefill '1x9x8' is not a step"),
        (["--prefill", "8x64"], "--prefill '8x64' is not a step"),
        (["--prefill", "1x0x8"], "--prefill '1x0x8' is not a step"),
        (["--device", "toaster"], "device 'toaster' is not a device; allowed are cpu, cuda and cuda:N"),
        (["--device", "cuda"], "device 'cuda': this machine shows 0 CUDA devices to PyTorch"),
        (["--device", "cuda:3"], "device 'cuda:3': this machine shows 0 CUDA devices"),
        (["--min-ms", "0"], "--min-ms is 0"),
        (["--head-dim", "0"], "--head-dim is 0"),
    ],
)
def test_errors_of_the_user(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *flags]) == 2
    assert message in capsys.readouterr().err


def test_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PAGED_ATTN_TUNED", "none")
    assert main(["tune"]) == 2
    assert "PAGED_ATTN_TUNED is off, so that no measurement is used; unset it, or give --out FILE" in capsys.readouterr().err


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--backend", "fa3"]) == 2
    assert "not every backend asked for can be timed here:\n  fa3: runs on cuda, not on cpu" in capsys.readouterr().err


@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_usual_steps_can_be_steps(phase: str) -> None:
    for shapes in (tune.GPU_SHAPES, tune.CPU_SHAPES):
        for label in shapes[phase]:
            assert all(cached >= (phase == "decode") and new >= 1 for cached, new in Step(phase, label).requests)
    assert Step("extend", "1x8x8").requests == ((0, 8),) and Step("decode", "2x5").requests == ((4, 1),) * 2


def test_the_real_clock_on_this_cpu(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--q-heads", "2", "--kv-heads", "1", "--head-dim", "16", "--page-size", "4", "--dtype", "float32")
    flags = ("--decode", "2x8", "--prefill", "1x4x8", "--min-ms", "1", "--backend", "torch_native", "--backend", "reference")
    assert main(["tune", *small, *flags]) == 0
    (entry,) = json.loads(path.read_text())["entries"]
    assert all(us > 0 for shapes in entry["microseconds"].values() for row in shapes.values() for us in row.values())
    assert entry["conditions"]["threads"] == torch.get_num_threads() and entry["versions"]["torch"] == version("torch")
    from paged_attn.attn_ops.specs.attention import AttentionSpec

    required = Requirements.of([AttentionSpec(2, 1, 16, 16, 1.0)], torch.float32, torch.float32, 4, torch.device("cpu"))
    taken = select("auto", required)
    assert taken.backend.name == "torch_native" and f"{path} (time over the fastest: prefill torch_native 1.00, reference" in taken.reason
