"""An engine launches no variant of a kernel that was not asked for before."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")
from paged_attn import LLM, SamplingParams
from tests.compiled.variants import variants
from tests.zoo.build import build

# Heads of 16 or more, so that strides are multiples of 16, as they are in models that people run.
CHANGES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 16},
    "deepseek_v2": {},
    "qwen3_next": {"head_dim": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CHANGES)
def test_nothing_is_launched_that_was_not_asked_for(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_ATTN_CACHE", "none")
    model = build(model_type, **CHANGES[model_type])
    settings: dict[str, Any] = {"backend": "triton", "num_pages": 64, "max_batch_tokens": 64}
    if model_type == "qwen3_next":
        settings["scans_backend"] = "triton"
    if model_type == "gpt_oss":  # experts are slow in the interpreter
        settings["experts_backend"] = "triton"
    with variants() as found, LLM(model, **settings) as llm:
        llm.generate([[1, 2, 3], [4, 5, 6, 7] * 6, [3]], SamplingParams(max_new_tokens=4, ignore_eos=True), progress=False)
    assert found.launched and not found.missing, found.missing
