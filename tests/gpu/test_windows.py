"""Groups of layers on a GPU: captured graphs with a table per group, overlapping steps, and NaN in whatever is given back."""

from __future__ import annotations

from typing import Any

import pytest

from paged_attn import LLM, SamplingParams, explain
from tests.engine.memory.test_windows import poison
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build

pytestmark = pytest.mark.usefixtures("full_float32")
PROMPTS = random_prompts((41, 9, 30, 1, 55, 16, 23, 8))
NEW = 20
SETTINGS: dict[str, Any] = {
    "page_size": 4, "num_pages": 14, "max_batch_tokens": 12, "max_requests": 8, "graph_decode_sizes": 3, "graph_extend_sizes": 2,
    "graph_strict": True, "inductor": False,
}  # fmt: skip


@pytest.mark.parametrize("name", ["gemma3_text", "llama4_text", "mistral"])
@pytest.mark.parametrize("mode", ["full", "off"])
def test_tokens_are_the_models_own_under_a_tight_pool(name: str, mode: str) -> None:
    model = build(name).cuda()
    expected = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    with LLM(model, graphs=mode, **SETTINGS) as llm:
        given_back, page_0 = poison(llm.engine), llm.engine.pool.storage[: llm.engine.pool.page_elements]
        page_0.zero_()  # a dummy's keys, always finite
        for _ in range(2):
            answers = llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW, temperature=0, ignore_eos=True))
            assert [answer.token_ids for answer in answers] == expected
        assert sum(given_back) and "keep window 8" in explain(llm).replace("chunk", "window")
