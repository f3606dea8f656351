"""The benchmark scripts run on tiny shapes on the CPU, and write what they say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.backends.problems import make, spec_of
from tests.server.serving import MODEL, serving

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--smoke", "--dtype", "float32", "--head-dim", "16", "--q-heads", "4", "--kv-heads", "2", "--min-ms", "1"]
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="pip install '.[bench]'")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kernels") / "deeper" / "kernels.json"
    assert script("kernels").main([*TINY, "--backends", "torch_native,fa3,reference", "--out", str(out)]) == 0
    return out


def test_kernels_writes_a_row_per_shape_and_backend(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(measured.read_text())
    assert {"date", "gpu", "command", "versions", "conditions", "ceilings", "shapes", "rows"} <= set(record)
    assert record["command"].startswith("python benchmarks/kernels.py --smoke --dtype float32")
    assert all(value > 0 for value in record["ceilings"].values()) and set(record["ceilings"]) == {"read", "copy", "gemm"}
    rows = {(row["shape"], row["backend"]): row for row in record["rows"]}
    assert set(rows) == {(shape, backend) for shape in record["shapes"] for backend in ("torch_native", "fa3", "reference")}
    assert {row["kind"] for row in record["rows"]} == {"decode", "prefill", "kv_write"}
    for (_, backend), row in rows.items():
        if backend == "fa3":
            assert "sgl" in row["error"] or "cuda" in row["error"]
        else:
            assert "error" not in row and row["microseconds"] in row["run_medians"] and len(row["run_medians"]) == 2
            assert row["ratio_to_best_peer"] is None and row["ratio_to_ceiling"] > 0 and row["min_microseconds"] <= row["microseconds"]


def test_the_writes_are_those_of_their_kind(measured: Path) -> None:
    rows = {(row["shape"], row["backend"]): row for row in json.loads(measured.read_text())["rows"]}
    row = rows["kv_write 8", "torch_native"]
    assert row["gbytes_per_s"] * row["microseconds"] * 1e3 == pytest.approx(4 * 8 * 2 * 2 * 32)


def test_kernels_runs_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "some.json"
    script("kernels").main([*TINY, "--backends", "torch_native", "--only", "ragged", "--runs", "1", "--with-write", "--out", str(out)])
    record = json.loads(out.read_text())
    assert list(record["shapes"]) == ["decode ragged 4"] and record["conditions"]["with_write"] is True
    row, kv = record["rows"][0], record["shapes"]["decode ragged 4"]["kv"]
    moved = 4 * (kv * 2 * 32 + 4 * 4 * 32 + 2 * 4 * 2 * 32)  # KV, queries and output, and what is written
    assert row["gbytes_per_s"] * row["microseconds"] * 1e3 == pytest.approx(moved)
    assert "| decode ragged 4 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="leaves no shape; there are: decode 1 x 40"):
        script("kernels").main([*TINY, "--only", "no such shape"])


def test_ratios_are_to_the_faster_peer_and_to_the_ceiling() -> None:
    kernels = script("kernels")
    rows = [
        {"shape": "s", "kind": kind, "backend": backend, "microseconds": us, "gbytes_per_s": 10.0, "tflops": 2.0}
        for kind, backend, us in (("decode", "triton", 8.0), ("decode", "fa3", 10.0), ("decode", "flashinfer", 9.0))
    ]
    rows.append({"shape": "s", "kind": "decode", "backend": "flex", "error": "no"})
    kernels.add_ratios(rows, {"read": 40.0, "gemm": 8.0, "copy": 1.0})
    assert [row.get("ratio_to_best_peer") for row in rows] == [9 / 8, 0.9, 1.0, None]
    assert rows[0]["ratio_to_ceiling"] == 0.25
    prefill = [rows[0] | {"kind": "prefill"}]
    kernels.add_ratios(prefill, {"read": 40.0, "gemm": 8.0, "copy": 1.0})
    assert prefill[0]["ratio_to_ceiling"] == 0.25 and prefill[0]["ratio_to_best_peer"] is None


def test_the_shapes_are_those_of_the_peers_and_three_ragged_batches() -> None:
    kernels = script("kernels")
    shapes = {name: (kind, requests) for name, kind, requests, _ in kernels.shapes(False)}
    assert {name: shared for name, _, _, shared in kernels.shapes(False) if shared}["decode 64 x (2,048 shared + 64)"] == 2048
    assert sum(kind == "decode" for kind, _ in shapes.values()) == 14 and sum(kind == "prefill" for kind, _ in shapes.values()) == 4
    assert shapes["decode 64 x 4,096"] == ("decode", ((4095, 1),) * 64)
    assert shapes["prefill 4 x 512 x 8,192"] == ("prefill", ((7680, 512),) * 4)
    for count in (32, 64, 128):
        lengths = [cached + new for cached, new in shapes[f"decode ragged {count}"][1]]
        assert len(lengths) == count and 64 <= min(lengths) < 200 and 8_000 < max(lengths) <= 16_384
        assert lengths == kernels.ragged_lengths(count, 16_384)


@needs_matplotlib
def test_chart(tmp_path: Path) -> None:
    rows = [
        {"shape": shape, "kind": kind, "backend": backend, "gbytes_per_s": 3000.0, "tflops": 400.0}
        for shape, kind in (("decode 1 x 4,096", "decode"), ("decode ragged 32", "decode"), ("prefill 1 x 8,192 x 8,192", "prefill"))
        for backend in ("triton", "fa3")
    ]
    rows.append({"shape": "decode 1 x 4,096", "kind": "decode", "backend": "flashinfer", "error": "not installed"})
    record = {"gpu": "H200", "date": "2026-11-20", "conditions": {"layer": "32 heads"}, "ceilings": {"read": 4364.0, "gemm": 764.0}}
    data, out = tmp_path / "kernels.json", tmp_path / "docs" / "kernels.svg"
    data.write_text(json.dumps(record | {"rows": rows}))
    assert script("chart").main(["--data", str(data), "--out", str(out)]) == 0
    text = out.read_text()
    for word in ("triton", "fa3", "4,096", "ragged", "H200", "Decode, GB/s", "Prefill, TFLOP/s", "ceiling"):
        assert word in text, word
    assert "flashinfer" not in text
    script("chart").main(["--data", str(data), "--out", str(tmp_path / "again.svg")])
    assert (tmp_path / "again.svg").read_text() == text
    with pytest.raises(ValueError, match="no times of flex; the file has"):
        script("chart").main(["--data", str(data), "--out", str(out), "--backends", "flex"])


def test_op_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "op.json"
    arguments = ["--requests", "4", "--pages", "3", "--layers", "2", "--q-heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    assert script("op_overhead").main([*arguments, "--backends", "torch_native,fa3", "--out", str(out)]) == 0
    times = json.loads(out.read_text())["microseconds"]
    assert 0 < times["op"] < 1000 and len(times["batch"]) == 5 and all(value > 0 for value in times["batch"].values())
    assert times["backends"]["torch_native"]["plan"] > 0 and "error" in times["backends"]["fa3"]
    assert "the op, no kernel" in capsys.readouterr().out


def test_capture_times_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    out, tiny = tmp_path / "capture.json", ["--smoke", "--batches", "1", "3", "--context", "20", "--prompts", "17", "--rows", "32"]
    script("capture").main([*tiny, "--modes", "eager", "full_merged", "--out", str(out)])
    record = json.loads(out.read_text())
    assert set(record["modes"]) == {"eager", "full_merged"} and record["ceilings"]["read"] > 0
    for mode in record["modes"].values():
        assert set(mode["decode"]) == {"1", "3"} and all(0 < row["floor_ms"] < row["ms"] for row in mode["decode"].values())
        assert mode["extend"]["17"]["ms"] > 0
    script("capture").main([*tiny, "--startup", "full_merged", "--out", str(out)])
    assert json.loads(out.read_text())["startup"]["full_merged"]["first_token"] > 0


def test_decode_chain_runs_attention_between_products(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["decode_chain.py", "--backend", "torch_native", "--layers", "llama,gpt-oss"])
    script("decode_chain").main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["llama", "gpt-oss"] and all(line.endswith(" us") for line in lines)


def test_scans_times_the_truth_where_there_is_no_gpu(tmp_path: Path) -> None:
    out = tmp_path / "scans.json"
    small = ["--device", "cpu", "--shape", "falcon-mamba-7b", "--prompts", "3,2", "--decode", "1"]
    assert script("scans").main([*small, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["what"] for row in rows] == ["2 prompts of 5 tokens", "1 decoding"]
    assert all(row["truth us"] > 0 < row["read once us"] for row in rows)


def test_prefill_times_tiny_prompts_and_takes_numbers_of_tilings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    prefill, out = script("prefill"), tmp_path / "prefill.json"
    assert prefill.main(["--smoke", "--dims", "24/16", "--min-ms", "1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["shape"] for row in rows] == ["24/16 1 x 20", "24/16 2 x 7"] and all(row["tflops"] > 0 for row in rows)
    assert "24/16 2 x 7" in capsys.readouterr().out
    assert prefill.numbers_of("block_n=64,turns=0") == {"block_n": 64, "turns": 0}
    with pytest.raises(SystemExit, match="size; give name=number of block_m, block_n"):
        prefill.numbers_of("size=64")


def test_prefill_launches_with_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from paged_attn.backends.attention.triton.tiling import Tiling
    from paged_attn.backends.machine import Machine

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    prefill, case = script("prefill"), make([(0, 140)], spec_of(dim=128), page_size=16, dtype=torch.bfloat16)
    plan = "paged_attn.backends.attention.triton.plan.machine_of"
    monkeypatch.setattr(plan, lambda device: Machine(33, hopper=True, early=True))

    def tilings(numbers: dict[str, int]) -> list[Tiling]:
        return [share.kind.tiling for share in prefill.WithTiling(numbers).plan(case.batch, case.pool).shares]

    assert any(each.hopper and each.stages == 3 and not each.turns for each in tilings({"stages": 3, "turns": 0}))
    assert tilings({}) != tilings({"stages": 3}) and not any(each.hopper for each in tilings({"hopper": 0}))


def test_latent_decode_times_tiny_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    assert script("latent_decode").main(["--smoke", "--heads", "4", "--rank", "32", "--rotated", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "rows of 32 + 8" in lines[0] and [line[:9].strip() for line in lines[1:]] == ["1 x 40", "3 x 17", "ragged 4"]
    assert all("torch_native" in line and "differs from torch_native by 0.0e+00" in line for line in lines[1:])


@pytest.mark.slow
def test_hf_generate_times_every_system(tmp_path: Path) -> None:
    out = tmp_path / "hf_generate.json"
    assert script("hf_generate").main(["--cpu-smoke", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["system"], row["batch"]) for row in rows] == [(s, b) for s in ("static", "custom_generate", "compile") for b in (1, 4)]
    assert all(row["tokens_as_first_system"] == 1 and row["tokens_per_s"] > 0 and row["ratio_to_static"] > 0 for row in rows)


def test_experts_beside_other_backends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    experts, out = script("experts"), tmp_path / "experts.json"
    monkeypatch.setattr(experts, "SHAPES", {"tiny": experts.Shape(4, 2, 64, 32)})
    arguments = ["--shape", "tiny", "--tokens", "1", "--beside", "one_by_one", "sgl_kernel", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["experts", *arguments])
    experts.main()
    row = json.loads(out.read_text())["tiny"][0]
    assert row["one_by_one_us"] > 0 and row["one_by_one_error"] == 0 and capsys.readouterr().out.startswith("tiny {")
    if not torch.cuda.is_available():
        assert "runs on cuda, not on cpu" in row["sgl_kernel_refused"]


def test_host_time_of_a_step_of_the_engine() -> None:
    assert len(script("host_time").measure(requests=2, prompt=20, steps=3, text=False)) == 3


@pytest.mark.parametrize("flags", [[], ["--no-stream"], ["--more", '{"logit_bias": {"7": 100}}']])
def test_serve_counts_what_a_server_answers(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "serve.json"
    with serving() as running:
        command = ["--url", running.url, "--ids", "5-40", "--load", "3x7:9+5", *flags]
        assert script("serve").main(["--model", MODEL, "--out", str(out), *command]) == 0
        assert script("serve").main(["--model", "another", *command]) == 1, "an answer that is an error counts as one"
    (load,) = json.loads(out.read_text())["loads"]
    assert load["tokens_per_second"] == pytest.approx(7 * 5 / load["seconds"]) and not load["errors"]
    assert (load["first_token"] is None) is ("--no-stream" in flags) is not load["stream"] and load["request"]["p50"] > 0
    assert "3 clients, 9 + 5" in (told := capsys.readouterr().out) and "7 FAILED" in told and "no model" in told
