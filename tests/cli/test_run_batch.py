"""`paged-attn run-batch`: answers as `LLM` gives them, errors beside them, and going on where a run ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paged_attn import LLM, SamplingParams
from paged_attn.asynchronous.engine_thread import EngineThread
from paged_attn.cli.main import main

PROMPTS = [f"Prompt {'x' * (i % 7)} number {i}" for i in range(12)]


def write(path: Path, bodies: dict[str, dict[str, Any]]) -> None:
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} for name, body in bodies.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def answers(path: Path) -> dict[str, dict[str, Any]]:
    return {answer["custom_id"]: answer["response"] for answer in map(json.loads, path.read_text().splitlines())}


def batch(model: Path, requests: Path, out: Path, *flags: str) -> int:
    return main(["run-batch", str(model), "-i", str(requests), "-o", str(out), "--num-pages", "64", "--max-requests", "3", *flags])


def test_a_file_is_answered_and_gone_on_with(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests, out = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    with LLM(model_folder, num_pages=64) as llm:
        want = {f"{i}": c.text for i, c in enumerate(llm.generate(PROMPTS, SamplingParams(max_new_tokens=10)))}
    bodies: dict[str, dict[str, Any]] = {name: {"prompt": PROMPTS[int(name)], "max_tokens": 10, "temperature": 0} for name in want}
    write(requests, {**bodies, "wrong": {"prompt": "a", "max_tokens": -1}})
    assert batch(model_folder, requests, out) == 1
    told = capsys.readouterr().err
    assert "13 of 13 requests answered, 1 of them with an error" in told and "the first error: 'wrong': max_tokens: got -1" in told
    given = answers(out)
    assert given.pop("wrong")["status_code"] == 400
    assert {name: response["body"]["choices"][0]["text"] for name, response in given.items()} == want

    assert batch(model_folder, requests, out) == 2
    assert "has answers already; choose another --output-file, or --resume" in capsys.readouterr().err
    write(requests, {**bodies, "more": {"prompt": "a", "max_tokens": 1}})
    assert batch(model_folder, requests, out, "--resume") == 0
    assert "1 of 1 requests answered, 0 of them with an error, 1 new tokens" in capsys.readouterr().err
    assert answers(out).keys() == {*want, "wrong", "more"}


def test_lines_are_checked_before_the_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = tmp_path / "requests.jsonl"
    write(requests, {"a": {"stream": True}})
    (tmp_path / "config.json").write_text("{}")
    assert batch(tmp_path, requests, tmp_path / "out") == 2
    assert "line 1: stream is True" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_an_engine_that_dies_ends_the_command(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, out = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    write(requests, {f"{i}": {"prompt": "a", "max_tokens": 2} for i in range(20)})

    def dies(*_: object) -> None:
        raise SystemError("gone")

    monkeypatch.setattr(EngineThread, "_admit", dies)
    with pytest.raises(SystemError, match="gone"):
        batch(model_folder, requests, out)
    assert "0 of 20 requests answered" in capsys.readouterr().err and out.read_text() == ""
