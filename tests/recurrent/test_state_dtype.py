"""States in 16 bits, where they are asked for: half as many bytes, rounded at every step, and never of a model in float32."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from transformers import PreTrainedModel

import paged_attn
from paged_attn import LLM, RecurrentStates, SamplingParams, UnsupportedError
from tests.oracle import random_prompts
from tests.recurrent_models import recurrent

PROMPTS = random_prompts((5, 17, 40, 1))
NAMES = ("qwen3_next", "bamba")


@functools.cache
def in_bfloat16(name: str) -> PreTrainedModel:
    return copy.deepcopy(recurrent(name)).to(torch.bfloat16)


def llm_of(name: str, state_dtype: str) -> LLM:
    return LLM(in_bfloat16(name), state_dtype=state_dtype, max_batch_tokens=16, num_pages=64, max_requests=4)


@pytest.mark.parametrize("name", NAMES)
def test_they_take_half_of_the_bytes_and_give_the_same_within_16_bits(name: str) -> None:
    with llm_of(name, "auto") as own, llm_of(name, "bfloat16") as narrow:
        wide, half = (llm.engine.state_pool for llm in (own, narrow))
        assert wide is not None and half is not None
        assert all(state.dtype == torch.bfloat16 for state in half.tensors)
        kept = [sum(state.nbytes for state in pool.tensors if state.dim() > 3) / pool.num_slots for pool in (wide, half)]
        assert kept[0] == 2 * kept[1] > 0
        params = SamplingParams(max_new_tokens=12, ignore_eos=True)
        tokens = [[done.token_ids for done in llm.generate(PROMPTS, params)] for llm in (own, narrow)]
        same = sum(a == b for pair in zip(*tokens, strict=True) for a, b in zip(*pair, strict=True))
        assert same >= 0.7 * 12 * len(PROMPTS)
        assert "bfloat16" in paged_attn.explain(narrow)


def test_a_request_goes_on_from_a_kept_state_as_the_one_that_left_it() -> None:
    """A prefix is found in the cache, with its state in 16 bits: the tokens are those of a run without a cache."""
    shared, params = random_prompts((48,))[0], SamplingParams(max_new_tokens=8, ignore_eos=True)
    with llm_of("bamba", "bfloat16") as llm:
        first = llm.generate([shared], params)[0].token_ids
        again = llm.generate([shared + first], params)[0]
        assert again.cached_tokens > 0
        llm.clear_prefix_cache()
        assert llm.generate([shared + first], params)[0].token_ids == again.token_ids


def test_a_model_in_float32_keeps_its_own() -> None:
    with pytest.raises(UnsupportedError, match=r"state_dtype='bfloat16', but model\.layers\.0\.\S+ computes in torch\.float32"):
        LLM(recurrent("bamba"), state_dtype="bfloat16")


def test_a_layer_that_runs_by_its_own_forward_keeps_its_own() -> None:
    with pytest.raises(UnsupportedError, match="runs by its own forward"):
        LLM(in_bfloat16("bamba"), state_dtype="bfloat16", disable_passes=("scans",))


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="state_dtype"):
        LLM(in_bfloat16("bamba"), state_dtype="int8")


def test_states_of_ones_own_engine() -> None:
    states = RecurrentStates(in_bfloat16("bamba"), 3, state_dtype="float16")
    assert {state.dtype for state in states.pool.tensors} == {torch.float16, torch.bfloat16}  # of the scan, and of the convolution
    states.close()
