"""A checkpoint that is cut short, lacks weights or has another model's config is told so, and nothing random is served."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged_attn import LLM, UnsupportedError
from tests.tiny_models import build


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("qwen3").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("size", [0, 20, 5000])
def test_a_file_that_is_cut_short_is_named(folder: Path, size: int) -> None:
    os.truncate(folder / "model.safetensors", size)
    said = f"no causal language model could be loaded from '{folder}': model.safetensors ({size:,} bytes) is not a whole safetensors file: "
    with pytest.raises(ValueError, match=re.escape(said) + ".*; copy or download it again"):
        LLM(folder)


def test_a_pickle_that_is_cut_short(folder: Path) -> None:
    torch.save({**load_file(folder / "model.safetensors"), "more": torch.zeros(10**5)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    os.truncate(folder / "pytorch_model.bin", 10**5)
    with pytest.raises(ValueError, match=r"a file of its weights is cut short or damaged: PytorchStreamReader failed.*; copy or download"):
        LLM(folder)


def test_no_weights_are_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    gone = [path for path in weights if path.startswith("model.layers.1.mlp.")]
    save_file({path: weight for path, weight in weights.items() if path not in gone}, folder / "model.safetensors", {"format": "pt"})
    said = "no weights of model.layers.1.mlp.down_proj.weight and 2 others, which its config.json asks for"
    with pytest.raises(UnsupportedError, match=re.escape(said)):
        LLM(folder)


def test_weights_of_other_shapes_than_the_config_says(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(ValueError, match=r"its weights have other shapes than its config.json says"):
        LLM(folder)
