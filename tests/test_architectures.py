"""Every architecture generates, token for token, what its own generate() does: ragged, chunked, cold and warm."""

from __future__ import annotations

import pytest

from paged_attn import LLM, SamplingParams
from tests.oracle import greedy, random_prompts
from tests.tiny_models import ARCHITECTURES, build

PROMPTS = random_prompts((1, 5, 17, 33, 70))
NEW_TOKENS = 16


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_same_tokens_as_the_models_own_generate(name: str) -> None:
    model = build(name, tie_word_embeddings=False)  # tied tiny models repeat one token
    expected = [greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    for page_size in (1, 16):
        with LLM(model, page_size=page_size, max_batch_tokens=16, num_pages=400) as llm:
            for cache in ("cold", "warm"):
                got = llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS))
                assert [c.token_ids for c in got] == expected, f"{name}, page size {page_size}, {cache}"
                reused = [c.cached_tokens for c in got]
                assert reused == ([0] * 5 if cache == "cold" else [(len(p) - 1) // page_size * page_size for p in PROMPTS])


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llama4_text", "deepseek_v3"])
def test_the_oracle_backend_agrees(name: str) -> None:
    model = build(name, tie_word_embeddings=False)
    prompts = random_prompts((3, 19, 11), seed=5)
    with LLM(model, backend="reference", max_batch_tokens=16, num_pages=64) as llm:
        got = llm.generate(prompts, SamplingParams(max_new_tokens=6))
    assert [c.token_ids for c in got] == [greedy(model, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("change", [{"sliding_window": 9}, {"sliding_window": None}])
def test_tokens_would_show_a_window_that_is_off_by_one_or_dropped(change: dict[str, int | None]) -> None:
    """A negative control: the prompts above can see the mistakes that they guard against."""
    right, wrong = (build("mistral", tie_word_embeddings=False, **changed) for changed in ({}, change))
    assert any(greedy(right, p, NEW_TOKENS) != greedy(wrong, p, NEW_TOKENS) for p in PROMPTS)
