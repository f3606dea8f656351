"""Models whose rotation and store of K and V are one op generate their own tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paged_attn import LLM, SamplingParams
from tests.oracle import greedy, random_prompts
from tests.passes.rope_spellings import ropes
from tests.tiny_models import COMMON, build

MORE: dict[str, dict[str, Any]] = {
    "phi": {"partial_rotary_factor": 0.5},
    "gptj": {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4, "n_positions": 256, "n_inner": 48},
    "glm": {},
    "cohere": {},
    "gemma2": {"sliding_window": 8, "attn_logit_softcapping": 20.0},
}
# How many of three layers rotate and store in one op. Others have no rotation, or one that the op does not compute.
LAYERS = {
    "llama": 3, "qwen2": 3, "qwen3": 3, "phi": 3, "gptj": 3, "gemma2": 3, "gemma3_text": 3, "glm": 3, "cohere": 3, "gpt_neox": 3,
    "falcon": 3, "mixtral": 3, "cohere2": 2, "llama4_text": 0, "deepseek_v3": 0, "gpt2": 0,
}  # fmt: skip
ANGLES = {"gemma3_text": 2, "gptj": 3}  # kinds of layers by their angles; GPT-J has a table of its own in each layer
PROMPTS = random_prompts((1, 5, 17, 33))


def tiny(name: str, **changes: Any) -> Any:
    if name not in MORE:
        return build(name, **changes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**COMMON, **MORE[name], **changes})).eval()


@pytest.mark.parametrize("name", LAYERS)
def test_models_give_their_own_tokens(name: str) -> None:
    assert ropes_that_serve(tiny(name)) == LAYERS[name]


def test_llama_4_without_a_norm_after_its_complex_rotation() -> None:
    assert ropes_that_serve(tiny("llama4_text", use_qk_norm=False)) == 2


def ropes_that_serve(model: Any) -> int:
    """After chunked prefills, decode steps and reused prefixes gave the model's own tokens."""
    with LLM(model, page_size=4, max_batch_tokens=16, num_pages=200, rope_and_store=True) as llm:
        for _ in ("cold", "warm"):
            got = llm.generate(PROMPTS, SamplingParams(max_new_tokens=6))
            assert [c.token_ids for c in got] == [greedy(model, p, 6) for p in PROMPTS]
        rewrite = llm.engine.runner.compiled.rewrite
        found = ropes(rewrite)
    assert len(found) == len(rewrite.rotated_layers)
    assert len({rope.args[3:5] for rope in found}) == min(len(found), ANGLES.get(model.config.model_type, 1))
    return len(found)
