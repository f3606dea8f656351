"""What users get wrong, and interruptions: one line on stderr, the status, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paged_attn.cli.commands import generate
from paged_attn.cli.main import build_parser, main
from paged_attn.cli.options import engine_config, sampling_params

SAY = ("--prompt", "x")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/no/such/folder", *SAY], "no model at '/no/such/folder'"),
        (["--model", __file__, *SAY], "not a directory. Give a directory with config.json"),
        (["--backend", "no_such_backend", *SAY], "unknown attention backend 'no_such_backend'; known are 'auto'"),
        (["--temperature", "-1", *SAY], "temperature: got -1.0"),
        (["--temperature", "0.5", "--check", *SAY], "--check compares greedy tokens and is not defined for --temperature 0.5"),
        (["--page-size", "0", *SAY], "page_size is 0; allowed are values of at least 1"),
        (["--num-pages", "many", *SAY], "num_pages is 'many'"),
        (["--prefix-cache", "perhaps", *SAY], "prefix_cache is 'perhaps'"),
        (["--device", "toaster", *SAY], "device 'toaster' is not a device"),
        (["--device", "cuda:99", *SAY], "device 'cuda:99': this machine shows"),
        (["--prompt-file", "/no/such/file"], "--prompt-file /no/such/file"),
        (["--prompt-file", sys.executable], "allowed: UTF-8 text, a prompt on each line"),
        (["--prompt", ""], "the prompt is empty"),
        ([], "no prompt; give --prompt"),
    ],
)
def test_errors_of_the_user(flags: list[str], message: str, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(model_folder), "--num-pages", "8", *flags]) == 2
    lines = capsys.readouterr().err.splitlines(keepends=True)
    error = "".join(line for line in lines if not line.startswith(("loading ", "Qwen3ForCausalLM in float32")))  # where it came so far
    assert error.startswith("paged-attn: error: ") and message in error and "Traceback" not in error


@pytest.mark.parametrize("argv", [["generate", "--no-such-option"], ["generate", "--model", "x", "--dtype", "int3"], ["fly"], []])
def test_arguments_that_do_not_parse(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generate", "--tempratur", "1", "--model", "x"], "generate: error: there is no --tempratur; did you mean --temperature?"),
        (["chat", "--model", "x", "--page-sise=8"], "chat: error: there is no --page-sise; did you mean --page-size?"),
        (["serve", "--model", "x", "--enforce-eager", "9"], "serve: error: there is no --enforce-eager; graphs='off' captures nothing"),
        (["generate", "--model", "x", "--modell", "9"], "generate: error: there is no --modell; did you mean --model?"),
        (["demo", "--model", "x"], "demo: error: there is no --model (see"),
        (["serve", "--model", "x", "--zzz"], "serve: error: there is no --zzz (see `paged-attn serve --help`)"),
        (["generate", "--model", "x", "--prompt", "It", "was a"], "generate: error: unexpected 'was a'; a value with spaces"),
        (["generate", "x", "--prompt", "It", "was a"], "generate: error: unexpected 'x was a'; a value with spaces"),
        (["serve", "x", "--model", "y"], "serve: error: unexpected 'x'; a value with spaces"),
        (["serve", "x", "--zzz"], "serve: error: there is no --zzz (see"),
        (["serve"], "serve: error: no model; give MODEL first: a directory"),
        (["serve", ""], "serve: error: no model; give MODEL first: a directory"),
        (["generate", "x", "--json-schema", "no.json"], "generate: error: argument --json-schema: 'no.json' cannot be read"),
        (["generat"], "error: argument COMMAND: invalid choice: 'generat'"),
        ([], "error: the following arguments are required: COMMAND (see `paged-attn --help`)"),
    ],
)
def test_what_does_not_parse_is_one_line_with_what_was_meant(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.removeprefix("paged-attn").lstrip(": ").startswith(said)


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "explain", "warmup", "backends", "tune"])
@pytest.mark.parametrize(
    "argv",
    [
        ["x", "--dtype", "float16"],
        ["--dtype", "float16", "x"],
        ["--model", "x", "--dtype", "float16"],
        ["--dtype", "float16", "--model=x"],
        ["--dtype", "float16", "--", "x"],
    ],
)
def test_a_model_is_given_with_and_without_its_flag(command: str, argv: list[str]) -> None:
    assert build_parser().parse_args([command, *argv]).model == "x"


def test_a_schema_is_given_as_text_or_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    given = ['{"type": "object"}', str(tmp_path / "schema.json")]
    assert {build_parser().parse_args(["generate", "x", "--json-schema", each]).json_schema for each in given} == {given[0]}


def test_flags_by_the_names_of_other_engines() -> None:
    flags = ["--max-tokens", "7", "--block-size", "8", "--max-num-seqs", "3", "--enable-prefix-caching", "off"]
    args = build_parser().parse_args(["generate", "--model", "x", *flags])
    assert sampling_params(args).max_new_tokens == 7
    config = engine_config(args)
    assert (config.page_size, config.max_requests, config.prefix_cache) == (8, 3, False)


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
