"""A table of 48 rows under logits of 43 ids: prompts may hold ids that no token can be chosen of."""

from __future__ import annotations

import math

import pytest
import torch

from paged_attn import LLM, SamplingParams
from tests.engine.tracing.test_reference_code import VOCAB, Reference

IDS = VOCAB - 5
PROMPT = [3, VOCAB - 1, 7, IDS, 11]


@pytest.fixture(scope="module")
def model() -> Reference:
    return Reference(IDS).eval()


@pytest.fixture(scope="module")
def llm(model: Reference):
    with LLM(model, num_pages=40) as made:
        yield made


def tokens_of(model: Reference, penalty: float = 1.0) -> list[int]:
    ids = list(PROMPT)
    for _ in range(6):
        logits = model(torch.tensor([ids]))[0, -1]
        seen = torch.tensor([token for token in set(ids) if token < IDS])
        logits[seen] = torch.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
        ids.append(int(logits.argmax()))
    return ids[len(PROMPT) :]


@torch.no_grad()
def test_penalties_are_of_the_ids_that_can_be_chosen(model: Reference, llm: LLM) -> None:
    for penalty in (1.0, 3.0):
        params = SamplingParams(max_new_tokens=6, repetition_penalty=penalty, temperature=0.0)
        assert llm.generate([PROMPT], params)[0].token_ids == tokens_of(model, penalty)
    assert tokens_of(model) != tokens_of(model, 3.0)


@torch.no_grad()
def test_a_scored_prompt_has_no_probability_for_the_others(model: Reference, llm: LLM) -> None:
    (scored,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=2, prompt_logprobs=2))
    expected = model(torch.tensor([PROMPT]))[0].log_softmax(-1)
    found = [known[token] for known, token in zip(scored.prompt_logprobs[1:], PROMPT[1:], strict=True)]
    assert [value == -math.inf for value in found] == [True, False, True, False]
    assert (found[1], found[3]) == pytest.approx((float(expected[1, 7]), float(expected[3, 11])), abs=1e-5)


def test_other_ids_are_refused_before_they_run(llm: LLM) -> None:
    with pytest.raises(ValueError, match=f"token id {VOCAB} at position 1 of the prompt .* ids 0 to {VOCAB - 1}"):
        llm.generate([[1, VOCAB]], SamplingParams(max_new_tokens=2))
    with pytest.raises(ValueError, match=f"logit_bias: got token id {IDS}; allowed: 0 to {IDS - 1}"):
        llm.generate([[1]], SamplingParams(max_new_tokens=2, logit_bias={IDS: 1.0}))
