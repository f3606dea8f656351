"""`demo`, `explain`, `backends`, `doctor`, and the start of the command itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paged_attn import __version__
from paged_attn.attn_ops.install_line import install_line
from paged_attn.cli.commands import demo, doctor
from paged_attn.cli.main import main


def test_demo_shows_rewrite_backend_texts_and_numbers(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "embedded_model", lambda: model_folder)
    monkeypatch.setattr(demo, "PROMPTS", ("Emma", "The shared beginning of two letters, A", "The shared beginning of two letters, B"))
    assert main(["demo", "--max-new-tokens", "5", "--check", "--num-pages", "64"]) == 0
    out = capsys.readouterr().out
    for words in (
        "Qwen3ForCausalLM",
        "rewrote     3 attention layers",
        "layers 0-2",
        "mask evaluated on",
        "self-check",
        "torch_native (first",
    ):
        assert words in out, words
    assert "3 prompts of 4 to 38 bytes" in out and "38 prompt tokens, 32 from the prefix cache, 5 new (length)" in out
    assert "prefix cache 32 of 80" in " ".join(out.split()) and "check passed: all 15 new tokens" in out


def test_demo_without_the_embedded_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "embedded_model", lambda: None)
    assert main(["demo"]) == 2
    assert "lacks the embedded model" in capsys.readouterr().err


def test_demo_prompts_fit_the_model_and_the_last_two_share_pages() -> None:
    assert max(len(prompt.encode()) for prompt in demo.PROMPTS) < 1024
    assert len(demo.PROMPTS) == 6 and all(prompt.startswith(demo.LETTER) for prompt in demo.PROMPTS[-2:])


def test_explain(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", str(model_folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "torch_native" and found["graphs"][0]["layers"][0]["modules"] == "model.layers.{0-2}.self_attn"


def test_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends"]) == 0 and main(["backends", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "yes: cpu" in out and "| torch_native |" in out


def test_doctor_passes_here_and_fails_if_the_op_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "everything that is needed works" in out and 'backend="paged_attn"' in out and install_line("flashinfer") in out
    monkeypatch.setattr(doctor, "op_error", lambda: float("nan"))
    assert main(["doctor"]) == 1
    assert "not working: smoke test" in capsys.readouterr().out


def test_help_and_version_import_neither_torch_nor_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import sys, paged_attn.cli.main as m; m.build_parser().format_help(); print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"paged-attn {__version__}\n"


def test_the_package_runs_as_the_script_does() -> None:
    done = subprocess.run([sys.executable, "-m", "paged_attn", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"paged-attn {__version__}\n"
