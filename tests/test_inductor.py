"""The pieces between attentions compiled by Inductor: the same tokens. Slow: C++ compiles."""

from __future__ import annotations

import pytest
import torch

from paged_attn import LLM, SamplingParams
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build


@pytest.mark.slow
def test_compiled_pieces_give_the_models_own_tokens() -> None:
    torch._dynamo.reset()
    model, prompts = build("llama", num_hidden_layers=2), random_prompts((1, 5, 17))
    with LLM(model, inductor=True, max_batch_tokens=16, num_pages=64) as llm:
        assert llm.engine.runner.compiled.compiled_by == "Inductor pieces"
        got = llm.generate(prompts, SamplingParams(max_new_tokens=6))
    assert [c.token_ids for c in got] == [greedy(model, p, 6) for p in prompts]
