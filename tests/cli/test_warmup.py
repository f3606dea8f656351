"""`paged-attn warmup`: what it announces, the phases that it times, the tokens that it runs, the caches that it fills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paged_attn.cli.commands import warmup
from paged_attn.cli.commands.warmup import coming, run_tokens
from paged_attn.cli.main import main
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.llm import LLM
from tests.tiny_models import build

PHASES = (
    "load", "other", "find recurrent layers", "prove recurrent ops", "read a kept graph", "trace", "rewrite and prove", "self-check",
    "graphs and pool", "first token", "3 prompts", "in all",
)  # fmt: skip


def test_it_announces_first_and_then_times_each_phase(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGED_ATTN_CACHE", str(tmp_path))  # where no other test has kept this model's graph
    seen: list[str] = []
    monkeypatch.setattr(warmup, "run_tokens", lambda llm: seen.append(capsys.readouterr().out) or run_tokens(llm))
    assert main(["warmup", "--model", str(model_folder), "--num-pages", "64"]) == 0
    out = capsys.readouterr().out
    assert f"warming up {model_folder} on cpu" in seen[0] and "tracing the model" in seen[0] and "the traced graph alone is kept" in seen[0]
    seconds = {name.strip(): float(value) for name, value in re.findall(r"^  (\w[\w -]*?) +([\d.]+) s$", out, re.MULTILINE)}
    assert tuple(seconds) == PHASES
    assert seconds["in all"] == pytest.approx(sum(seconds[name] for name in PHASES[:-1]), abs=0.05) and seconds["trace"] > 0.05
    assert "\n  decode       uncaptured, rewritten, eager pieces" in out and "torch_native (first" in out


@pytest.mark.parametrize(
    ("model", "settings", "lengths", "new"),
    [
        ({}, {"num_pages": 64}, [3, 17, 40], 8),
        ({}, {"num_pages": 64, "max_batch_tokens": 7}, [3, 17, 40], 8),
        ({}, {"num_pages": 2, "page_size": 1}, [1, 1, 1], 1),
        ({}, {"num_pages": 3, "page_size": 4}, [1, 1, 1], 7),
        ({"max_position_embeddings": 12, "vocab_size": 7}, {"num_pages": 64}, [3, 4, 4], 8),
    ],
)
def test_it_runs_prompts_alone_ragged_and_cached_within_the_limits(
    model: dict[str, int], settings: dict[str, int], lengths: list[int], new: int
) -> None:
    with LLM(build("llama", **model), **settings) as llm:
        assert [len(prompt) for prompt in run_tokens(llm)] == lengths
        assert llm.engine.stats.new_tokens == 7 * new
        assert (llm.engine.stats.cached_tokens > 0) == (max(lengths) > 16)


@pytest.mark.parametrize(
    ("device", "settings", "said", "unsaid"),
    [
        (
            "cpu",
            {},
            ["loading", "tracing", "kept in /somewhere/graphs", "the traced graph alone is kept"],
            ["Inductor compiles", "CUDA graphs", "Triton"],
        ),
        ("cpu", {"inductor": True}, ["Inductor compiles", "kept in /somewhere/pieces"], ["no cache is filled", "CUDA graphs"]),
        ("cuda:1", {}, ["Inductor compiles", "Triton", "CUDA graphs for up to 55 sizes"], ["no cache is filled"]),
        ("cuda", {"graphs": "piecewise"}, ["Inductor compiles", "up to 20 sizes"], []),
        ("cuda", {"graphs": "off", "inductor": False}, ["tracing", "Triton"], ["Inductor compiles", "CUDA graphs", "no cache is filled"]),
        ("cuda", {"compile": False}, ["Triton"], ["tracing", "Inductor compiles"]),
    ],
)
def test_what_may_take_long_follows_the_settings(
    device: str, settings: dict[str, object], said: list[str], unsaid: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGED_ATTN_CACHE", "/somewhere")
    text = "\n".join(coming(EngineConfig(**settings), device))  # type: ignore[arg-type]
    assert [word for word in said if word not in text] == [] and [word for word in unsaid if word in text] == [], text
    monkeypatch.setenv("PAGED_ATTN_CACHE", "none")
    assert ("no folder of ours" in "\n".join(coming(EngineConfig(**settings), device))) == settings.get("compile", True)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_next_process_finds_the_pieces_on_disk(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGED_ATTN_CACHE", str(tmp_path))
    for loaded in (0, 3):
        assert main(["warmup", "--model", str(model_folder), "--num-pages", "16", "--inductor"]) == 0
        assert re.search(rf"  compiled +3 distinct of 4 in .* s, {loaded} of them loaded from disk", capsys.readouterr().out)
    assert len(list((tmp_path / "pieces").glob("*.piece"))) == 3


def test_errors_are_those_of_the_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--model", "/no/such/folder"]) == 2
    assert "no model at '/no/such/folder'" in capsys.readouterr().err
    assert main(["warmup", "--model", "x", "--page-size", "0"]) == 2
    assert capsys.readouterr().out == "", "settings are checked before anything is announced"
