"""Latent attention of remote code and of DeepSeek's reference code: token for token, with one row per token in the pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.engine.runners import traced_runner
from paged_attn.graph_cache.entries import VARIABLE
from tests.engine.model import latent_code
from tests.engine.model.latent_code import RANK, ROTATED, LatentCausal
from tests.engine.runners.own_positions import greedy_loop
from tests.oracle import random_prompts

PROMPTS = random_prompts((1, 5, 17, 33, 70))
GREEDY = SamplingParams(max_new_tokens=6)


def made(name: str) -> LatentCausal:
    model: LatentCausal = getattr(latent_code, name)().eval()
    return model


@pytest.mark.parametrize("name", ["Naive", "AbsorbedByModel", "Padded"])
def test_tokens_are_those_of_the_model(name: str) -> None:
    """The self-check and the second step have more tokens than the buffers have rows."""
    model = made(name)
    expected = [greedy_loop(made(name), prompt, 6) for prompt in PROMPTS]
    for settings in ({}, {"page_size": 4, "max_batch_tokens": 16}):
        with LLM(model, num_pages=300, **settings) as llm:
            layers = llm.engine.runner.layers
            assert all(isinstance(spec, LatentSpec) and spec.kv_elements == RANK + ROTATED for spec in layers) and len(layers) == 2
            for _ in range(2):
                assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected, settings
            assert llm.engine.scheduler.stats.prompt_tokens_cached > 60


@pytest.mark.parametrize("name", ["AbsorbedByModel", "Padded"])
def test_the_graph_is_kept_on_disk(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    served = []
    for _ in range(2):
        with LLM(made(name), num_pages=40) as llm:
            served.append(([c.token_ids for c in llm.generate(PROMPTS[:3], GREEDY)], llm.engine.runner.layers))
        monkeypatch.setattr(traced_runner, "trace_model", lambda *_: pytest.fail("the model was traced"))
    assert served[0] == served[1]
