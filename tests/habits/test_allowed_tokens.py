"""`allowed_token_ids`, as vLLM has it: against the model's own `generate` with a processor that forbids the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor

from paged_attn import SamplingParams
from tests.engine.models import assert_nothing_left, make_llm, oracle, random_prompts, tiny
from tests.server.serving import Running, serving
from tests.tiny_models import VOCAB

PROMPTS = random_prompts(11, 3, 9, 17, 30)
NEW = 12
ALLOWED = [tuple(range(i, VOCAB, 3 + i)) for i in range(len(PROMPTS))]


def generated(prompt: list[int], allowed: tuple[int, ...]) -> list[int]:
    others = [token for token in range(VOCAB) if token not in allowed]
    out = tiny().generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=NEW, do_sample=False,
        logits_processor=LogitsProcessorList([SuppressTokensLogitsProcessor(others)]),
    )  # fmt: skip
    return list(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("overlap", [False, True])
def test_allowed_tokens_are_those_of_a_processor(overlap: bool) -> None:
    """Beside requests that say nothing, and prompts in chunks."""
    llm = make_llm(overlap=overlap, max_batch_tokens=16)
    params = [SamplingParams(max_tokens=NEW, allowed_token_ids=allowed) for allowed in ALLOWED]
    found = [c.token_ids for c in llm.generate([*PROMPTS, PROMPTS[0]], [*params, SamplingParams(max_tokens=NEW)])]
    expected = [generated(prompt, allowed) for prompt, allowed in zip(PROMPTS, ALLOWED, strict=True)]
    assert found == [*expected, oracle(PROMPTS[0], NEW)]
    assert_nothing_left(llm)


def test_drawn_tokens_are_allowed_ones_whatever_else_is_asked() -> None:
    llm = make_llm(overlap=True)
    params = SamplingParams(
        max_tokens=20, temperature=2.0, seed=1, n=3, allowed_token_ids={5, 6, 7}, logit_bias={9: 100.0, 7: -100.0},
        bad_words=[(5, 5, 5)], repetition_penalty=1.3, logprobs=2,
    )  # fmt: skip
    for completion in llm.generate(PROMPTS, params):
        assert set(completion.token_ids) == {5, 6} and len(completion.token_ids) == 20
    assert_nothing_left(llm)


def test_what_no_request_may_ask() -> None:
    llm = make_llm()
    with pytest.raises(ValueError, match=rf"allowed_token_ids: got token id {VOCAB}; allowed: 0 to {VOCAB - 1}"):
        llm.generate([[4]], SamplingParams(allowed_token_ids=[VOCAB]))
    with pytest.raises(TypeError, match=r"allowed_token_ids: got 5; allowed: a tuple, list or set .* write \(id,\) for one"):
        SamplingParams(allowed_token_ids=5)
    with pytest.raises(ValueError, match=r"allowed_token_ids: got \(\); allowed: .* at least one; None allows all"):
        SamplingParams(allowed_token_ids=())
    with pytest.raises(ValueError, match="its own allowed_token_ids, bad_words left no token that may come next"):
        llm.generate([[4]], SamplingParams(max_tokens=3, allowed_token_ids=[5], bad_words=[(5,)]))
    assert_nothing_left(llm)


def test_the_same_over_http() -> None:
    with serving() as running:

        def answer(**fields: Any) -> list[int]:
            body = {"prompt": PROMPTS[1], "max_tokens": NEW, "temperature": 0, "return_token_ids": True, **fields}
            return list(running.http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["token_ids"])

        assert answer(allowed_token_ids=list(ALLOWED[1])) == generated(PROMPTS[1], ALLOWED[1])
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "allowed_token_ids": [5]}
        assert _text(running, chat) == "$" * 4


def _text(running: Running, body: dict[str, Any]) -> str:
    text: str = running.http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]["message"]["content"]
    return text
