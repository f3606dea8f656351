"""Every example runs, does what it says, and stays short."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted(p.stem for p in (Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_have_a_main_and_are_short(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "pypi_model":
        pytest.importorskip("x_transformers", reason="pip install '.[examples]'")
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    module = importlib.import_module(name)
    assert callable(module.main)
    assert len(Path(module.__file__).read_text().splitlines()) <= 80


def test_compile_backend() -> None:
    assert importlib.import_module("examples.compile_backend").main() == 0.0


def test_serve_prompts() -> None:
    completions = importlib.import_module("examples.serve_prompts").main()
    assert [len(c.token_ids) for c in completions] == [40, 40, 40]
    assert all(c.text.replace("\n", "").isprintable() for c in completions)


def test_answers_follow_their_schema_and_expression() -> None:
    """The script checks both."""
    pytest.importorskip("llguidance", reason="pip install '.[structured]'")
    assert set(importlib.import_module("examples.structured_output").main()) == {"name", "age", "married"}


def test_a_model_that_is_split_at_its_own_ops_gives_its_own_tokens() -> None:
    """The script compares with the module's own loop."""
    assert [len(tokens) for tokens in importlib.import_module("examples.moe_split_point").main()] == [12] * 4


def test_a_tiny_model_is_trained_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, and little of the text that is held out."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    corpus = importlib.import_module("tiny_lm.corpus").Corpus
    whole = corpus.held_out_windows
    monkeypatch.setattr(corpus, "held_out_windows", lambda self, window: tuple(each[:2] for each in whole(self, window)))
    given = ["train_tiny_lm.py", "--steps", "2", "--batch-size", "2", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", given)
    precision = torch.get_float32_matmul_precision()
    try:
        importlib.import_module("train_tiny_lm").main()
    finally:
        torch.set_float32_matmul_precision(precision)
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "config.json").exists()


def test_patch_model() -> None:
    assert len(importlib.import_module("examples.patch_model").main()) == 2


@pytest.mark.parametrize("name", ["plain_gpt", "nanogpt_like"])
def test_a_plain_module_gives_its_own_tokens(name: str) -> None:
    """The script compares with the module's own loop and raises if they differ."""
    assert [len(tokens) for tokens in importlib.import_module(f"examples.{name}").main()] == [12] * 4


def test_a_model_of_another_package_gives_its_own_tokens() -> None:
    pytest.importorskip("x_transformers", reason="pip install '.[examples]'")
    example = importlib.import_module("examples.pypi_model")
    assert {name: [len(tokens) for tokens in each] for name, each in example.main().items()} == dict.fromkeys(example.LAYOUTS, [12] * 4)


def test_own_backend_gives_the_tokens_of_torch_native(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_attn.backends.selection import registry

    monkeypatch.setattr(registry, "_of_this_process", {})  # other tests count the backends
    assert [len(tokens) for tokens in importlib.import_module("examples.own_backend").main()] == [40] * 3
    assert registry.third_party_names() == ["mine"]


@pytest.mark.parametrize("feature", ["plain", "window", "gqa_7"])
@pytest.mark.parametrize("lengths", [[(0, 7), (0, 1), (9, 4)], [(1, 1), (15, 1), (16, 1)], [(17, 1), (0, 1), (6, 5)]])
def test_own_backend_keeps_the_contract(feature: str, lengths: list[tuple[int, int]]) -> None:
    """The oracle's numbers on ragged batches, zeros in padded rows, and nothing else read or written."""
    from tests.backends.agreeing import agree
    from tests.backends.problems import make, spec_of

    agree(make(lengths, spec_of(feature), page_size=4, extra_rows=3), importlib.import_module("examples.own_backend").MyBackend())


def test_engine_author_gives_the_models_own_text() -> None:
    from transformers import AutoModelForCausalLM

    from tests.oracle import greedy

    example = importlib.import_module("examples.engine_author")
    texts = example.main()
    model = AutoModelForCausalLM.from_pretrained(str(example.files("paged_attn.demo_model")))
    model = model.float()
    for prompt, count, text in zip(example.PROMPTS, example.NEW_TOKENS, texts, strict=True):
        assert text == (prompt + bytes(greedy(model, prompt, count))).decode()
