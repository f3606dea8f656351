"""Models with recurrent state on a GPU: their kernels in the engine, in full graphs, with prefixes and preemption."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from paged_attn import LLM, SamplingParams, explain
from tests.oracle import greedy, random_prompts
from tests.recurrent_models import RECURRENT, recurrent
from tests.zoo.build import build

NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(name not in CONFIG_MAPPING, reason=f"this transformers has no {name}"))
    for name in ("qwen3_next", "kimi_linear", "bamba", "falcon_h1", "lfm2", "jamba", "mamba", "mamba2", "minimax", "zamba", "xlstm")
]
PROMPTS = random_prompts((80, 3, 1, 21, 130), seed=5)


@functools.cache
def on_cpu(name: str) -> Any:
    return recurrent(name) if name in RECURRENT else build(name)


def on_gpu(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(on_cpu(name)).to("cuda", dtype)


def answers(llm: LLM, prompts: Sequence[list[int]], new: int = 12) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(prompts, SamplingParams(max_new_tokens=new))]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_models_in_float32(name: str, full_float32: None) -> None:
    expected = [greedy(on_cpu(name), prompt, 12) for prompt in PROMPTS]
    with LLM(on_gpu(name), page_size=4, num_pages=400, max_batch_tokens=64, inductor=False) as llm:
        assert "by ops on the slots of its state" in explain(llm), explain(llm)
        assert answers(llm, PROMPTS) == expected
        assert answers(llm, PROMPTS) == expected, "from snapshots"


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "jamba"])
def test_who_is_preempted_goes_on(name: str, full_float32: None) -> None:
    expected = [greedy(on_cpu(name), prompt, 12) for prompt in PROMPTS[:4]]
    with LLM(on_gpu(name), page_size=4, num_pages=32, max_batch_tokens=32, inductor=False) as llm:
        assert answers(llm, PROMPTS[:4]) == expected


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "jamba", "lfm2"])
def test_in_sixteen_bits_the_kernels_are_taken_and_decode_is_captured_whole(name: str) -> None:
    with LLM(on_gpu(name, torch.bfloat16), page_size=16, num_pages=200) as llm:
        text = explain(llm)
        assert all(layer.ops for layer in llm.engine.runner.recurrent), text
        assert llm.engine.step_runner.graphs is not None and llm.engine.step_runner.report().full, "full graphs hold the scans"
        assert all(len(tokens) == 12 for tokens in answers(llm, PROMPTS))


@pytest.mark.parametrize("name", NAMES)
def test_states_on_the_way_serve_whoever_starts_there(name: str, full_float32: None) -> None:
    """One step for each prompt, states at regular distances, and forks anywhere."""
    stem, other = PROMPTS[4], PROMPTS[0]
    cuts = (0, 7, 16, 33, 64, 127, 129)
    with LLM(
        on_gpu(name),
        page_size=4,
        num_pages=800,
        max_batch_tokens=512,
        inductor=False,
        overlap=False,
        state_snapshots=128,
        snapshot_interval=16,
    ) as llm:
        assert answers(llm, [stem]) == [greedy(on_cpu(name), stem, 12)] and llm.engine.stats.steps == 12
        for cut in cuts:
            prompt = stem[:cut] + other[:20]
            (got,) = llm.generate([prompt], SamplingParams(max_new_tokens=12))
            assert got.token_ids == greedy(on_cpu(name), prompt, 12)
            assert got.cached_tokens >= min(cut // 16 * 16, 128)
        assert llm.engine.stats.steps == 12 * (1 + len(cuts)), "no prompt takes two"
