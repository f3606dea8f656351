"""Scores of prompts on a GPU: beside captured steps that overlap, the model's own numbers, and nothing waits for the device."""

from __future__ import annotations

import pytest
import torch

from paged_attn import LLM, SamplingParams
from paged_attn.engine.sampling.sampler_output import PromptScores, ScoredTokens
from tests.gpu.test_no_sync import waiting_is_an_error
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build

PROMPTS = random_prompts((1, 5, 17, 33, 70))


@pytest.mark.usefixtures("full_float32")
@pytest.mark.parametrize("max_batch_tokens", [16, 512])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_scores_beside_captured_steps(name: str, max_batch_tokens: int) -> None:
    model = build(name).cuda()
    with torch.no_grad():
        own = [model(torch.tensor([prompt], device="cuda")).logits[0].log_softmax(-1).tolist() for prompt in PROMPTS]
    wanted = [SamplingParams(max_new_tokens=0, prompt_logprobs=1), SamplingParams(max_new_tokens=8, prompt_logprobs=1), SamplingParams(8)]
    with LLM(model, max_batch_tokens=max_batch_tokens, num_pages=128, max_requests=8) as llm:
        for _ in ("cold", "warm"):
            completions = llm.generate([prompt for prompt in PROMPTS for _ in wanted], wanted * len(PROMPTS))
            for number, completion in enumerate(completions):
                prompt, params = PROMPTS[number // 3], wanted[number % 3]
                assert completion.token_ids == greedy(model, prompt, 8)[: params.max_new_tokens]
                rows = (completion.prompt_logprobs or [])[1:]
                assert len(rows) == (len(prompt) - 1 if params.prompt_logprobs is not None else 0)
                for token, row, got in zip(prompt[1:], own[number // 3], rows, strict=False):
                    assert got is not None and got[token] == pytest.approx(row[token], abs=1e-4)


def test_nothing_waits_until_the_scores_are_asked_for() -> None:
    logits = torch.randn(300, 40_000, device="cuda", dtype=torch.bfloat16)
    parts = [ScoredTokens(0, list(range(200)), 1), ScoredTokens(200, list(range(100)), 3)]
    for _ in range(2):
        PromptScores(logits, parts).wait()
    with waiting_is_an_error():
        scores = PromptScores(logits, parts)
    expected = logits.float().log_softmax(-1)[torch.arange(300), torch.tensor([*range(200), *range(100)])].tolist()
    found = [token.logprob for part in scores.wait() for token in part or ()]
    assert found == pytest.approx(expected, abs=1e-4)
