"""A tiny byte-level checkpoint on disk, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.tiny_lm.saving import build_tokenizer
from tests.tiny_models import build


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    build("qwen3", vocab_size=257, eos_token_id=256).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
