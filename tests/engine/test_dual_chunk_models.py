"""A model file with dual chunk attention, served: token for token, whatever the steps look like and however it is written."""

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
from transformers import Qwen2ForCausalLM

import paged_attn
from paged_attn import LLM, SamplingParams, UnsupportedError, attention_layers
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.dual_chunk import DualChunkSpec
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.runners import make_runner, traced_runner
from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.graph_cache.entries import VARIABLE
from paged_attn.passes import replace_layers
from paged_attn.passes.replace.dual_chunk import replace_dual_chunk
from tests.engine.model.dual_chunk_code import Qwen2DualChunkForCausalLM, made
from tests.engine.runners.own_positions import greedy_loop
from tests.oracle import random_prompts

CHUNK, NEW = 8, 10
PROMPTS = random_prompts((1, 6, 8, 17, 37))  # in the first chunk, to its end, at a border, over two borders
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


@cache
def tiny(spelling: str = "masked", chunk: int = CHUNK) -> Qwen2DualChunkForCausalLM:
    return made(spelling, chunk)


@cache
def truth(chunk: int = CHUNK) -> list[list[int]]:
    return [greedy_loop(tiny("masked", chunk), prompt, NEW) for prompt in PROMPTS]


@cache
def _runner() -> TracedRunner:
    return TracedRunner(tiny(), CompileOptions())


@contextmanager
def one_capture() -> Iterator[None]:
    """Engines made inside share one capture of the tiny model."""
    with mock.patch.object(make_runner, "TracedRunner", lambda *_: copy.copy(_runner())):
        yield


def served(model: Qwen2DualChunkForCausalLM | None = None, **settings: Any) -> tuple[list[list[int]], Any]:
    """The tokens for all prompts, and the runner."""
    with LLM(model or tiny(), **{"page_size": 4, "num_pages": 64, "max_batch_tokens": 16, **settings}) as llm:
        return [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)], llm.engine.runner


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_prompts_in_pieces_among_decoding_requests_and_from_the_cache(page_size: int) -> None:
    with one_capture(), LLM(tiny(), page_size=page_size, num_pages=240 // page_size, max_batch_tokens=16) as llm:
        assert all(isinstance(spec, DualChunkSpec) and spec.chunk == CHUNK for spec in llm.engine.runner.layers)
        for _ in range(2):
            assert [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)] == truth()
        assert llm.engine.scheduler.stats.prompt_tokens_cached > 16


def test_the_merged_spelling_is_the_same() -> None:
    tokens, runner = served(tiny("merged"))
    assert tokens == truth() and all(isinstance(spec, DualChunkSpec) for spec in runner.layers)


def test_the_self_check_sees_queries_that_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanged(*args: Any) -> tuple[Any, ...]:
        site, queries, key, value, proof, *rest = args
        return replace_dual_chunk(site, queries, key, value, replace(proof, order=proof.order[::-1]), *rest)

    monkeypatch.setattr(replace_layers, "replace_dual_chunk", exchanged)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.self_attn"):
        served(made())


def test_a_chunk_that_only_scaled_probes_show() -> None:
    tokens, runner = served(tiny("masked", 21))
    assert tokens == truth(21) != truth() and runner.layers[0].chunk == 21


def test_the_reference_backend() -> None:
    with one_capture():
        assert served(backend="reference", self_check=False)[0] == truth()


def test_a_backend_without_it_is_refused() -> None:
    with one_capture(), pytest.raises(UnsupportedError, match="no dual chunk attention"):
        served(backend="flex")


def test_explain_says_so() -> None:
    with one_capture(), LLM(tiny(), page_size=4, num_pages=64) as llm:
        words = " ".join(str(paged_attn.explain(llm)).split())
    assert "4 heads over 2 KV, dim 8, causal, dual chunks of 8, scale 0.3536" in words
    assert (
        "softmax of three products proved by output evaluated on 5 probes = softmax of intra, successive, inter products, chunk 8" in words
    )
    assert "agrees with the config: chunk_size 12 less local_size 4" in words


def test_the_graph_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    first = served()
    monkeypatch.setattr(traced_runner, "trace_model", lambda *_: pytest.fail("the model was traced"))
    again = served()
    assert first[0] == again[0] == truth() and again[1].compiled.rewrite.layers == first[1].compiled.rewrite.layers


def test_another_chunk_in_the_config_is_refused() -> None:
    model = made()
    model.config.dual_chunk_attention_config = model.config.dual_chunk_attention_config | {"local_size": 3}
    with pytest.raises(UnsupportedError, match="chunks of 8, but the model declares chunk_size 12 less local_size 3"):
        attention_layers(model)


def test_a_model_that_only_declares_it_is_served_as_it_computes() -> None:
    """Transformers' own Qwen2 does not look at what Qwen2.5-1M's config says."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(made().config).eval()
    assert [type(spec) for spec in attention_layers(model)] == [AttentionSpec] * 2
    assert "its dual_chunk_attention_config is not what this model's code computes" in str(paged_attn.explain(model))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
def test_the_triton_kernel_gives_the_models_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: tests/gpu has the real thing."""
    pytest.importorskip("triton")
    from paged_attn.backends.attention.triton.backend import TritonBackend

    monkeypatch.setattr(TritonBackend, "capabilities", replace(TritonBackend.capabilities, devices=frozenset({"cpu", "cuda"})))
    short = SamplingParams(max_new_tokens=3, ignore_eos=True)
    with (
        one_capture(),
        LLM(tiny(), page_size=4, num_pages=64, max_batch_tokens=16, backend="triton", graphs="off", self_check=False) as llm,
    ):
        assert [completion.token_ids for completion in llm.generate(PROMPTS[1:4:2], short)] == [truth()[1][:3], truth()[3][:3]]
