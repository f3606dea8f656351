"""What users get wrong, and interruptions: one line on stderr, the status, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paged_attn.cli.commands import generate
from paged_attn.cli.main import main

SAY = ("--prompt", "x")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/no/such/folder", *SAY], "no model at '/no/such/folder'"),
        (["--backend", "no_such_backend", *SAY], "unknown attention backend 'no_such_backend'; known are 'auto'"),
        (["--temperature", "-1", *SAY], "temperature: got -1.0"),
        (["--temperature", "0.5", "--check", *SAY], "--check compares greedy tokens and is not defined for --temperature 0.5"),
        (["--page-size", "0", *SAY], "page_size is 0; allowed are values of at least 1"),
        (["--num-pages", "many", *SAY], "num_pages is 'many'"),
        (["--prefix-cache", "perhaps", *SAY], "prefix_cache is 'perhaps'"),
        (["--device", "toaster", *SAY], "--device 'toaster' is no device"),
        (["--device", "cuda:99", *SAY], "--device 'cuda:99': this machine shows"),
        (["--prompt-file", "/no/such/file"], "--prompt-file /no/such/file"),
        (["--prompt", ""], "the prompt is empty"),
        ([], "no prompt; give --prompt"),
    ],
)
def test_errors_of_the_user(flags: list[str], message: str, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(model_folder), "--num-pages", "8", *flags]) == 2
    error = capsys.readouterr().err.removeprefix("Qwen3ForCausalLM in float32 on cpu\n")  # where a model was loaded before the error
    assert error.startswith("paged-attn: error: ") and message in error and "Traceback" not in error


@pytest.mark.parametrize("argv", [["generate", "--no-such-option"], ["generate", "--model", "x", "--dtype", "int3"], ["fly"], []])
def test_arguments_that_do_not_parse(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err


def test_settings_of_the_environment_are_checked_too(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGED_ATTN_PAGE_SIZE", "big")
    assert main(["generate", "--model", str(model_folder), *SAY]) == 2
    assert "page_size is 'big'" in capsys.readouterr().err


def test_interruption(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(args: object) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "read_prompts", interrupted)
    assert main(["generate", "--model", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_closed_pipe_does_not_trace_back() -> None:
    command = f"{sys.executable} -m paged_attn.cli.main backends | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.stderr == "" and done.returncode in (0, 141)
