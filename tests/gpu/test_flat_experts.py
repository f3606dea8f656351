"""DBRX's experts, whose rows lie in matrices, on a GPU: one op a layer inside captured graphs, no weight held twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn import LLM, SamplingParams
from tests.engine.tracing.test_flat_experts import dbrx
from tests.oracle import greedy, random_prompts

pytestmark = pytest.mark.usefixtures("full_float32")
PROMPTS = random_prompts((1, 5, 17, 33))


@pytest.mark.parametrize("inductor", [False, True])
def test_tokens_in_float32_by_triton_in_captured_graphs(inductor: bool) -> None:
    model = dbrx().cuda()
    expected = [greedy(model, prompt, 8) for prompt in PROMPTS]
    with LLM(model, inductor=inductor, num_pages=64, max_batch_tokens=16, max_requests=4, graph_strict=True) as llm:
        assert llm.engine.runner.compiled.rewrite.experts == {"triton": model.config.n_layers}  # type: ignore[attr-defined]
        assert llm.engine.step_runner.report().full.sizes
        got = llm.generate(PROMPTS, SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert [completion.token_ids for completion in got] == expected


def test_weights_are_not_doubled() -> None:
    """Experts of 216 MiB: an engine with few pages and graphs leaves far less than another copy of them."""
    model: Any = dbrx(ffn_hidden_size=6144, moe_num_experts=64).cuda().bfloat16()
    experts = [block.ffn.experts.mlp for block in model.transformer.blocks]
    torch.cuda.empty_cache()
    before, weights = torch.cuda.memory_allocated(), sum(each.nbytes for mlp in experts for each in mlp.parameters())
    with LLM(model, num_pages=16, max_batch_tokens=16, max_requests=2) as llm:
        assert sum(llm.engine.runner.compiled.rewrite.experts.values()) == len(experts)  # type: ignore[attr-defined]
        llm.generate(PROMPTS[:2], SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert torch.cuda.memory_allocated() - before < weights / 2
