"""Rotary embeddings that follow the length of the call: each request has the frequencies that it would have alone, token for token."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import paged_attn
from paged_attn import LLM, SamplingParams
from paged_attn.engine.tracing.ropes_by_length import RopesByLength
from tests.engine.models import make_llm, run_all
from tests.oracle import random_prompts
from tests.tiny_models import LONG_ROPE, build
from tests.zoo.build import build as build_of_zoo
from tests.zoo.oracle import loop

NEW = 8
# The border is at 64: requests that stay below it, end at it, cross it at their first, second and last token, or start beyond it.
LENGTHS = (5, 50, 56, 57, 58, 62, 63, 64, 65, 90)
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
FACTORS: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0], "factor": 8.0}
LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **FACTORS}
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e3}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.fixture(scope="module")
def phi3() -> PreTrainedModel:
    rope = {**LONG_ROPE["rope_parameters"], "long_factor": FACTORS["long_factor"]}
    return build("phi3", **{**LONG_ROPE, "rope_parameters": rope, "sliding_window": None})


@pytest.fixture(scope="module")
def expected(phi3: PreTrainedModel) -> list[list[int]]:
    return [loop(phi3, prompt, NEW) for prompt in random_prompts(LENGTHS)]


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(prompts, PARAMS)]


@pytest.mark.parametrize(
    "settings", [{}, {"page_size": 1}, {"prefix_cache": False, "overlap": True}, {"num_pages": 32}, {"compile": False}]
)
def test_ragged_batches_across_the_border(phi3: PreTrainedModel, expected: list[list[int]], settings: dict[str, Any]) -> None:
    """With chunks of 24 tokens, in cold and warm caches, and in memory for so few of them that requests are preempted."""
    settings = {"page_size": 4, "num_pages": 220 * 4 // settings.get("page_size", 4), "max_batch_tokens": 24, **settings}
    with make_llm(phi3, **settings) as llm:
        assert [tokens(llm, random_prompts(LENGTHS)) for _ in range(2)] == [expected] * 2
        assert (llm.engine.scheduler.stats.preemptions > 0) == (settings["num_pages"] == 32)


def test_a_full_device_is_no_other_rope(phi3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be served with the frequencies of one side for requests of both."""

    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.Tensor, "cos", no_room)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        RopesByLength(phi3)


def test_the_frequencies_matter(phi3: PreTrainedModel) -> None:
    """Else equal tokens would prove nothing: with the other ones the model gives others."""
    ids = torch.tensor([random_prompts([65])[0]])
    rope: Any = phi3.model.rotary_emb
    with torch.no_grad():
        own = phi3(input_ids=ids, use_cache=False).logits
        rope.config.rope_parameters["original_max_position_embeddings"] = 65
        try:
            other = phi3(input_ids=ids, use_cache=False).logits
        finally:
            rope.config.rope_parameters["original_max_position_embeddings"] = 64
    assert (own - other).abs().max() > 0.1


def test_prefixes_are_shared_within_a_side_alone(phi3: PreTrainedModel) -> None:
    """The same 48 tokens begin prompts on both sides of the border."""
    shared, *ends = random_prompts((48, 4, 6, 30, 32))
    prompts = [shared + end for end in ends]
    with make_llm(phi3) as llm:
        completions = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
    assert [completion.cached_tokens for completion in completions] == [0, 48, 0, 48]
    assert [completion.token_ids for completion in completions] == [loop(phi3, prompt, NEW) for prompt in prompts]


def test_a_request_that_outgrows_its_cache_leaves_it_to_others(phi3: PreTrainedModel) -> None:
    (prompt,) = random_prompts([62])
    with make_llm(phi3) as llm:
        tokens(llm, [prompt])
        (again,) = llm.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))
        assert again.cached_tokens == 60 and llm.engine.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("border", [3, 12, 20])
def test_where_the_border_lies_within_the_prompts_of_the_self_check(border: int, compiled: bool) -> None:
    model = build("phi3", **{**LONG_ROPE, "original_max_position_embeddings": border, "num_hidden_layers": 1})
    prompts = random_prompts((1, 9, 17, 30))
    with LLM(model, page_size=4, num_pages=64, compile=compiled) as llm:
        assert tokens(llm, prompts) == [loop(model, prompt, NEW) for prompt in prompts]


def test_scores_of_a_long_prompt_are_those_of_the_model(phi3: PreTrainedModel) -> None:
    (prompt,) = random_prompts([80])
    with make_llm(phi3, max_batch_tokens=24) as llm:
        (completion,) = llm.generate([prompt], SamplingParams(max_new_tokens=1, prompt_logprobs=0))
    with torch.no_grad():
        logits = phi3(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    assert completion.prompt_logprobs is not None
    for position in range(1, len(prompt)):
        scores = completion.prompt_logprobs[position]
        assert scores is not None and abs(scores[prompt[position]] - float(logits[position - 1, prompt[position]])) < 1e-4


def test_scores_alone_of_a_prompt_that_ends_behind_the_border(phi3: PreTrainedModel) -> None:
    """Nothing follows from its last token, but with it the model's call is a long one."""
    prompts = random_prompts((64, 65, 66))
    with make_llm(phi3) as llm:
        completions = llm.generate(prompts, SamplingParams(max_new_tokens=0, prompt_logprobs=0))
    for prompt, completion in zip(prompts, completions, strict=True):
        with torch.no_grad():
            logits = phi3(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
        assert completion.token_ids == [] and completion.prompt_logprobs is not None and len(completion.prompt_logprobs) == len(prompt)
        for position in range(1, len(prompt)):
            found = completion.prompt_logprobs[position]
            assert found is not None and abs(found[prompt[position]] - float(logits[position - 1, prompt[position]])) < 1e-4


def test_a_failed_step_leaves_the_others_right(phi3: PreTrainedModel) -> None:
    """A request that crosses the border while another is cancelled."""
    prompts = random_prompts((62, 30))
    with make_llm(phi3) as llm:
        engine = llm.engine
        crossing, other = (engine.add_request(prompt, PARAMS) for prompt in prompts)
        for _ in range(3):
            engine.step()
        engine.cancel(other.id)
        run_all(engine)
        assert crossing.output_token_ids == loop(phi3, prompts[0], NEW)


def test_from_a_kept_graph(phi3: PreTrainedModel, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_ATTN_CACHE", str(tmp_path))
    for from_disk in (False, True):
        with LLM(phi3, page_size=4, num_pages=220) as llm:
            assert ("loaded from disk" in llm.engine.runner.compiled.rewrite.seconds) == from_disk  # type: ignore[attr-defined]
            assert tokens(llm, random_prompts(LENGTHS)) == expected


OTHERS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONG, "original_max_position_embeddings": 64, "partial_rotary_factor": 1.0},
    "gemma3_text": {"rope_parameters": {"full_attention": LONG, "sliding_attention": PLAIN}},
    "minicpm3": {"rope_parameters": LONG},
    "deepseek_v3": {"rope_parameters": LONG},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_types(name: str) -> None:
    """Windows, whose pages are given back; one kind of layer of several; latents, whose rotated part is of all heads."""
    model, prompts = build_of_zoo(name, **OTHERS[name]), random_prompts(LENGTHS)
    with LLM(model, page_size=4, num_pages=220, max_batch_tokens=24) as llm:
        assert llm.engine.limits.length_borders == (64,)
        assert tokens(llm, prompts) == [loop(model, prompt, NEW) for prompt in prompts]


def test_dynamic_scaling_is_served_up_to_the_models_positions() -> None:
    model = build("llama", rope_parameters=DYNAMIC, max_position_embeddings=64)
    prompts = random_prompts((5, 40, 60, 64))
    with LLM(model, page_size=4, num_pages=100) as llm:
        completions = llm.generate(prompts, PARAMS)
        with pytest.raises(ValueError, match="the prompt is too long: 65 tokens > 64, the model's positions"):
            llm.generate(random_prompts([65]), PARAMS)
    for prompt, completion in zip(prompts, completions, strict=True):
        count = min(NEW, 65 - len(prompt))
        assert completion.token_ids == loop(model, prompt, count)


def test_modules_compute_outside_of_contexts_what_they_did(phi3: PreTrainedModel) -> None:
    ropes = RopesByLength(phi3)
    assert (ropes.borders, ropes.longest) == ((64,), None)
    inputs = [torch.tensor([prompt]) for prompt in random_prompts((64, 65, 20))]
    with torch.no_grad():
        before = [phi3(input_ids=ids, use_cache=False).logits for ids in inputs]
        with ropes.by_request():
            assert "forward" in vars(phi3.model.rotary_emb)
            inside = [phi3(input_ids=ids, use_cache=False).logits for ids in inputs]
    assert all(map(torch.equal, before, inside)) and "forward" not in vars(phi3.model.rotary_emb)


def test_a_module_that_computes_anything_else_is_left_as_it_is(phi3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rope: Any = phi3.model.rotary_emb
    before = rope.forward.__func__

    def other(module: nn.Module, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        cos, sin = before(module, x, position_ids)
        return cos * 1.01, sin

    other.__wrapped__ = before  # type: ignore[attr-defined]
    monkeypatch.setattr(type(rope), "forward", other)
    assert RopesByLength(phi3).borders == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_buffers_that_were_cast_with_the_model(phi3: PreTrainedModel, dtype: torch.dtype) -> None:
    model = copy.deepcopy(phi3).to(dtype)
    assert model.model.rotary_emb.inv_freq.dtype is dtype
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor([prompt]), use_cache=False).logits for prompt in random_prompts((20, 90))]
        with RopesByLength(model).by_request():
            found = [model(input_ids=torch.tensor([prompt]), use_cache=False).logits for prompt in random_prompts((20, 90))]
    assert all(map(torch.equal, expected, found))
    with make_llm(model) as llm:
        assert llm.engine.limits.length_borders == (64,)


def test_models_without_such_modules() -> None:
    assert (RopesByLength(build("llama")).borders, RopesByLength(nn.Linear(2, 2)).borders) == ((), ())


def test_explain_says_so(phi3: PreTrainedModel) -> None:
    with make_llm(phi3) as llm:
        text = paged_attn.explain(llm)
    assert "longrope     a request of more than 64 tokens has other keys: one that comes to have more is recomputed" in text
