"""Rotary embeddings that follow a request's length inside captured graphs: the op that says how long each row's request is."""

from __future__ import annotations

from typing import Any

import pytest

from paged_attn import LLM, SamplingParams
from tests.oracle import random_prompts
from tests.tiny_models import LONG_ROPE, build
from tests.zoo.oracle import loop

pytestmark = pytest.mark.usefixtures("full_float32")
NEW = 8
# The border is at 64: below it, crossed at the first, a middle and the last new token, and beyond it.
PROMPTS = random_prompts((5, 50, 57, 60, 62, 63, 64, 65, 90))
SETTINGS: dict[str, Any] = {
    "page_size": 4, "num_pages": 260, "max_batch_tokens": 24, "max_requests": 8, "graph_decode_sizes": 4, "graph_extend_sizes": 2,
    "graph_strict": True, "inductor": False,
}  # fmt: skip


@pytest.mark.parametrize("mode", ["full", "piecewise", "off"])
def test_each_request_has_the_frequencies_of_its_own_length(mode: str) -> None:
    rope = {**LONG_ROPE["rope_parameters"], "long_factor": [1.5, 2.0, 3.0, 4.0]}
    model = build("phi3", **{**LONG_ROPE, "rope_parameters": rope, "sliding_window": None}).cuda()
    expected = [loop(model, prompt, NEW) for prompt in PROMPTS]
    with LLM(model, graphs=mode, **SETTINGS) as llm:
        for _ in range(2):
            answers = llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW, temperature=0, ignore_eos=True))
            assert [answer.token_ids for answer in answers] == expected
