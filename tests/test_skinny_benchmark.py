"""benchmarks/skinny_linear.py runs on tiny sizes on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.test_benchmarks import script

pytest.importorskip("triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
def test_every_config_is_measured_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deeper" / "skinny.json"
    benchmark = script("skinny_linear")
    assert benchmark.main(["--smoke", "--rows", "2,5", "--only", "two", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["rows"] for row in rows} == {2, 5} and {row["shape"] for row in rows} == {"two"}
    assert all("error" not in row and row["microseconds"] > 0 and row["speedup"] > 0 for row in rows)
    assert "F.linear" in capsys.readouterr().out
    assert len(set(benchmark.configs())) == len(benchmark.configs()) < 50
    with pytest.raises(SystemExit, match="the shapes are one, two"):
        benchmark.main(["--smoke", "--only", "three"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
def test_wrong_numbers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = script("skinny_linear")
    monkeypatch.setattr(benchmark, "skinny_linear", lambda x, weight, config: x @ weight.t() * 1.1)
    assert benchmark.main(["--smoke", "--rows", "2", "--only", "one"]) == 1
