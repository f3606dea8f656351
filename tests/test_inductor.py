"""The pieces between attentions compiled by Inductor: the same tokens. Slow: C++ compiles."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch

from paged_attn import LLM, SamplingParams
from tests.oracle import greedy, random_prompts
from tests.recurrent_models import recurrent
from tests.tiny_models import build
from tests.zoo.build import build as zoo_model


@pytest.mark.slow
def test_compiled_pieces_give_the_models_own_tokens() -> None:
    torch._dynamo.reset()
    model, prompts = build("llama", num_hidden_layers=2), random_prompts((1, 5, 17))
    with LLM(model, inductor=True, max_batch_tokens=16, num_pages=64) as llm:
        assert llm.engine.runner.compiled.compiled_by == "Inductor pieces"
        got = llm.generate(prompts, SamplingParams(max_new_tokens=6))
    assert [c.token_ids for c in got] == [greedy(model, p, 6) for p in prompts]


@pytest.mark.slow
def test_pieces_that_split_by_numbers_in_tensors_are_compiled() -> None:
    """JetMoe's experts. On a GPU, where pieces are compiled unless asked otherwise, no engine started."""
    torch._dynamo.reset()
    model, prompts = zoo_model("jetmoe"), random_prompts((1, 5, 17))
    with LLM(model, inductor=True, max_batch_tokens=16, num_pages=64) as llm:
        got = llm.generate(prompts, SamplingParams(max_new_tokens=6, ignore_eos=True))
    assert [c.token_ids for c in got] == [greedy(model, p, 6) for p in prompts]


@pytest.mark.slow
def test_values_seen_by_the_self_check_keep_the_strides_that_the_next_piece_was_compiled_for() -> None:
    """A short convolution hands a slice of a projection on to its piece, and the self-check puts a changed one in its place."""
    torch._dynamo.reset()
    with LLM(copy.deepcopy(recurrent("lfm2")).to(torch.bfloat16), inductor=True, num_pages=64) as llm:
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))[0].token_ids) == 4


@pytest.mark.slow
def test_pieces_with_experts_are_on_disk_for_the_next_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PAGED_ATTN_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, "paged_attn")
    prompts = random_prompts((1, 5, 17))
    for found in (False, True):
        torch._dynamo.reset()
        model = zoo_model("qwen3_moe", num_hidden_layers=1)
        caplog.clear()
        with LLM(model, inductor=True, merge_linears=True, max_batch_tokens=16, num_pages=64) as llm:
            assert llm.engine.runner.compiled.compiled_by == "Inductor pieces"
            got = llm.generate(prompts, SamplingParams(max_new_tokens=6))
        assert ("loaded the rewritten graph" in caplog.text) == found
        assert [c.token_ids for c in got] == [greedy(model, p, 6) for p in prompts]
