"""The foundation on a GPU: the model's own tokens in float32, with and without Inductor, and 16-bit types close to it."""

from __future__ import annotations

import pytest
import torch

from paged_attn import LLM, SamplingParams
from tests.oracle import greedy, random_prompts
from tests.tiny_models import ARCHITECTURES, build

pytestmark = pytest.mark.usefixtures("full_float32")
PROMPTS = random_prompts((1, 5, 17, 33, 70))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_same_tokens_as_the_models_own_generate(name: str) -> None:
    model = build(name).cuda()
    expected = [greedy(model, p, 16) for p in PROMPTS]
    with LLM(model, inductor=False, max_batch_tokens=16, num_pages=64) as llm:
        for _ in ("cold", "warm"):
            assert [c.token_ids for c in llm.generate(PROMPTS, SamplingParams(max_new_tokens=16))] == expected


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral"])
def test_inductor_pieces_by_default(name: str) -> None:
    model = build(name).cuda()
    expected = [greedy(model, p, 8) for p in PROMPTS]
    with LLM(model, max_batch_tokens=16, num_pages=64) as llm:
        assert llm.engine.runner.compiled.compiled_by == "Inductor pieces"
        assert [c.token_ids for c in llm.generate(PROMPTS, SamplingParams(max_new_tokens=8))] == expected


@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma3_text", "mixtral", "llama4_text"])
def test_optional_passes_together(name: str, inductor: bool) -> None:
    """Heads turned and stored by one kernel, merged linears, the last layer's end for wanted rows only: captured, and in chunks."""
    model = build(name).cuda()
    expected = [greedy(model, p, 8) for p in PROMPTS]
    with LLM(model, inductor=inductor, max_batch_tokens=16, num_pages=64) as llm:
        rewrite = llm.engine.runner.compiled.rewrite
        assert rewrite.counts["early_logits_gather"] > 0
        for _ in ("cold", "warm"):
            assert [c.token_ids for c in llm.generate(PROMPTS, SamplingParams(max_new_tokens=8))] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_run_and_pass_their_self_check(dtype: torch.dtype) -> None:
    model = build("qwen3", initializer_range=0.05).to("cuda", dtype)
    with LLM(model, inductor=False, num_pages=64) as llm:
        assert llm.engine.pool.dtype == dtype
        assert [len(c.token_ids) for c in llm.generate(PROMPTS, SamplingParams(max_new_tokens=8))] == [8] * 5
