"""Models with latent attention, served: token for token, one row per token and layer in the pool, whatever the steps look like."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

import paged_attn
from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.kv.kv_pool import page_elements
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.latent import step
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.runners import make_runner, traced_runner
from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.graph_cache.entries import VARIABLE
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build
from tests.zoo.build import build as build_type

LENGTHS, NEW = (1, 5, 17, 40), 8
TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "longcat_flash", "youtu", "kimi_linear", "bailing_hybrid", "axk1")


@cache
def tiny() -> PreTrainedModel:
    return build("deepseek_v3")


@cache
def truth() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what the model itself says."""
    prompts = random_prompts(LENGTHS)
    return prompts, [greedy(tiny(), prompt, NEW) for prompt in prompts]


@cache
def _runner() -> TracedRunner:
    return TracedRunner(tiny(), CompileOptions(passes=("latent_attention",)))


@contextmanager
def one_capture() -> Iterator[None]:
    """Engines made inside share one capture of the tiny model."""
    with mock.patch.object(make_runner, "TracedRunner", lambda *_: copy.copy(_runner())):
        yield


def served(**settings: Any) -> tuple[list[list[int]], Any]:
    """The tokens for all prompts, and the runner."""
    with LLM(tiny(), **{"page_size": 4, "num_pages": 64, **settings}) as llm:
        done = llm.generate(truth()[0], SamplingParams(max_new_tokens=NEW, ignore_eos=True))
        return [completion.token_ids for completion in done], llm.engine.runner


@pytest.mark.usefixtures("traced_anew")
def test_a_row_per_token_and_layer_is_kept() -> None:
    tokens, runner = served(max_batch_tokens=16)
    assert tokens == truth()[1]
    config = tiny().config
    assert all(isinstance(spec, LatentSpec) for spec in runner.layers)
    assert page_elements(runner.layers, 1) == config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
    assert not [name for name in _called(runner) if "kv_b_proj" in name and "linear" in name], "nothing is expanded in the graph"


def _called(runner: Any) -> list[str]:
    return [f"{node.target} {node.args}" for node in runner.compiled.rewrite.gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("expand", [False, True], ids=["absorbed", "expanded"])
def test_both_ways_give_the_models_tokens(monkeypatch: pytest.MonkeyPatch, page_size: int, expand: bool) -> None:
    monkeypatch.setattr(step, "expands", lambda spec, new, cached: expand and new > 1)
    with one_capture():
        assert served(page_size=page_size, num_pages=200 // page_size, max_batch_tokens=16)[0] == truth()[1]


def test_prefixes_are_cached() -> None:
    prompts, expected = truth()
    with one_capture(), LLM(tiny(), page_size=4, num_pages=64, max_batch_tokens=16) as llm:
        for _ in range(2):
            done = llm.generate(prompts, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
            assert [completion.token_ids for completion in done] == expected
        assert llm.engine.scheduler.stats.prompt_tokens_cached > 20


def test_requests_are_preempted() -> None:
    prompts = random_prompts((9, 10, 11))
    with one_capture(), LLM(tiny(), page_size=4, num_pages=13) as llm:  # of 18 that all take together
        done = llm.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
        assert llm.engine.scheduler.stats.preemptions > 0
    assert [completion.token_ids for completion in done] == [greedy(tiny(), prompt, 12) for prompt in prompts]


def test_the_pass_can_be_switched_off() -> None:
    tokens, runner = served(disable_passes=("latent_attention",), self_check=False)
    assert tokens == truth()[1] and not any(isinstance(spec, LatentSpec) for spec in runner.layers)


@pytest.mark.parametrize("backend", ["reference", "torch_native,reference"])
def test_other_backends_with_latents(backend: str) -> None:
    with one_capture():
        assert served(backend=backend)[0] == truth()[1]


def test_a_backend_that_knows_no_latents_gets_keys_and_values() -> None:
    tokens, runner = served(backend="flex", self_check=False)
    assert tokens == truth()[1] and not any(isinstance(spec, LatentSpec) for spec in runner.layers)


def test_hooks_keep_keys_and_values() -> None:
    tokens, runner = served(compile=False)
    assert tokens == truth()[1] and not any(isinstance(spec, LatentSpec) for spec in runner.layers)


def test_explain_says_so() -> None:
    with LLM(tiny(), page_size=4, num_pages=64) as llm:
        words = str(paged_attn.explain(llm))
    assert "4 heads of one latent of 16 + 8 rotated, dim 24/16, causal" in words and "3 latent_attention" in words
    assert "keys and values evaluated: linear in 16 values a token + 8 that all heads share" in words
    assert "3 layers keep one row per token in place of keys and values" in words


def test_the_graph_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    first = served()
    monkeypatch.setattr(traced_runner, "trace_model", lambda *_: pytest.fail("the model was traced"))
    again = served()
    assert first[0] == again[0] == truth()[1]
    assert (
        again[1].compiled.rewrite.layers == first[1].compiled.rewrite.layers and again[1].compiled.rewrite.counts["latent_attention"] == 3
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_every_type_that_has_latents(name: str) -> None:
    model, prompts = build_type(name), random_prompts((1, 5, 17, 33, 70))
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    for page_size in (1, 16):
        with LLM(model, page_size=page_size, max_batch_tokens=16, num_pages=800 // page_size + 10) as llm:
            layers = llm.engine.runner.layers
            assert layers and all(isinstance(spec, LatentSpec) for spec in layers)
            for _ in range(2):
                done = llm.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
                assert [completion.token_ids for completion in done] == expected


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
def test_the_triton_kernel_gives_the_models_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: tests/gpu has the real thing."""
    pytest.importorskip("triton")
    from paged_attn.backends.attention.triton.backend import TritonBackend

    monkeypatch.setattr(TritonBackend, "capabilities", replace(TritonBackend.capabilities, devices=frozenset({"cpu", "cuda"})))
    tokens, runner = served(backend="triton", max_batch_tokens=16, graphs="off", self_check=False)
    assert tokens == truth()[1] and all(isinstance(spec, LatentSpec) for spec in runner.layers)
