"""People serve a hybrid (Qwen3-Next, Bamba, LFM2) as any other model: many prompts at once, chats that go on, and a word on how it runs."""

from __future__ import annotations

import pytest

from paged_attn import LLM, SamplingParams, explain
from tests.oracle import greedy, random_prompts
from tests.recurrent_models import recurrent

GREEDY = SamplingParams(max_new_tokens=8)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2"])
def test_prompts_of_any_lengths_together_and_a_chat_that_goes_on(name: str) -> None:
    model = recurrent(name)
    with LLM(model, page_size=4, num_pages=200, max_batch_tokens=256) as llm:
        assert all(layer.ops for layer in llm.engine.runner.recurrent)
        assert "by ops on the slots of its state" in explain(llm)
        prompts = random_prompts((80, 3, 1, 21), seed=5)  # one step holds all of them
        answers = [completion.token_ids for completion in llm.generate(prompts, GREEDY)]
        assert answers == [greedy(model, prompt, 8) for prompt in prompts]
        second = [*prompts[0], *answers[0], *random_prompts((9,), seed=6)[0]]
        (completion,) = llm.generate([second], GREEDY)
        assert completion.token_ids == greedy(model, second, 8) and completion.cached_tokens >= 76
