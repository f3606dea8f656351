"""An engine of one's own on torch.compile serves recurrent models on a GPU, and engines keep their states in 16 bits there."""

from __future__ import annotations

import copy

import pytest
import torch

from paged_attn import LLM, SamplingParams
from paged_attn.dynamo_backend import paged_attn
from tests.oracle import greedy, random_prompts
from tests.recurrent.test_states import NEW, PROMPTS, generated, states_for
from tests.recurrent_models import recurrent


@pytest.mark.usefixtures("full_float32")
@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_tokens_are_the_models(name: str) -> None:
    model = copy.deepcopy(recurrent(name)).cuda()
    with states_for(model) as states:
        tokens = generated(torch.compile(model, backend=paged_attn), states, chunk=10)  # its name is known only where it is installed
    assert tokens == [greedy(model, prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_states_in_16_bits(name: str) -> None:
    model = copy.deepcopy(recurrent(name)).to("cuda", torch.bfloat16)
    params, tokens = SamplingParams(max_new_tokens=12, ignore_eos=True), []
    for state_dtype in ("auto", "bfloat16"):
        with LLM(model, state_dtype=state_dtype, num_pages=128, max_requests=4, inductor=False) as llm:
            assert llm.engine.state_pool is not None
            wide = {state.dtype for state in llm.engine.state_pool.tensors} - {torch.bfloat16}
            assert wide == ({torch.float32} if state_dtype == "auto" else set())
            tokens.append([token for done in llm.generate(random_prompts((5, 40, 17)), params) for token in done.token_ids])
        torch._dynamo.reset()
    assert sum(one == other for one, other in zip(*tokens, strict=True)) >= 0.7 * len(tokens[0])
