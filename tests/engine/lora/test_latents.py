"""Adapters of a model whose keys and values are kept as latents."""

from __future__ import annotations

import pytest

from paged_attn import LLM, SamplingParams, UnsupportedError
from tests.engine.lora.adapters import adapted, base
from tests.oracle import greedy

PROMPT = [5, 9, 2, 33, 17]
AROUND = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")


@pytest.mark.slow
def test_linears_around_the_latents_are_adapted_and_those_inside_are_refused_with_the_way_out() -> None:
    around, inside = adapted("deepseek_v3", targets=AROUND), adapted("deepseek_v3", targets=["kv_b_proj"])
    with LLM(base("deepseek_v3"), max_loras=2, num_pages=64) as llm:
        llm.load_lora("around", around)
        got = llm.generate([PROMPT], SamplingParams(max_new_tokens=8), lora="around")
        assert got[0].token_ids == greedy(around, PROMPT, 8)
        with pytest.raises(UnsupportedError, match=r"kv_b_proj.*come back with disable_passes=\('latent_attention',\)"):
            llm.load_lora("inside", inside)
    with LLM(base("deepseek_v3"), loras={"inside": inside}, num_pages=64, disable_passes=("latent_attention",)) as llm:
        got = llm.generate([PROMPT], SamplingParams(max_new_tokens=8), lora="inside")
        assert got[0].token_ids == greedy(inside, PROMPT, 8)
