"""The graph rewrite and `paged_attn.patch` find out what a model's layers compute in two ways: they must find and compute the same.

Each model is compared by its specs, field by field, by the logits of a ragged batch, and by the tokens of both beside its own. What the
hook refuses is listed with its reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paged_attn import LLM, SamplingParams, UnsupportedError, patch
from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.check.runs.steps import Steps, probe_prompts, steps_of
from paged_attn.tolerances import row_errors, worst
from tests import tiny_models
from tests.hf.serving import served_by_hand
from tests.oracle import greedy, random_prompts
from tests.zoo.build import seeded
from tests.zoo.configs import config_for, model_class

PROMPTS, NEW = random_prompts((1, 5, 17, 33)), 6
ROUNDING = 2e-5
SCALE = 1e-6  # a written-out softmax tells its scale by values, not by name

# Beyond tests.tiny_models: written-out softmax, softcaps, sinks, shared KV, other windows and other layouts of the projections.
FROM_THE_ZOO = (
    "gemma2", "gpt_oss", "gemma3n_text", "exaone4", "jetmoe", "gpt_bigcode",
)  # fmt: skip
NO_INTERFACE = "does not let its attention be replaced through transformers' AttentionInterface"
SLICED = "of its attention mask after building it, which paged_attn.patch cannot follow"
TWICE = "attends more than once in one forward, and paged_attn.patch keeps one KV for each layer"
REFUSED_BY_THE_HOOK = {
    "falcon": NO_INTERFACE,
    "bloom": NO_INTERFACE,
    "mpt": NO_INTERFACE,
    "granite_swa": NO_INTERFACE,
    "llama4_text": "self-check failed: query of attention 2",  # its temperature counts rows, not positions
    "deepseek_v32": SLICED,
    "diffllama": TWICE,
    "hrm_text": TWICE,
    "git": "its mask function reads a table of the call's own tokens",
    "musicgen": "reads its tokens from a ModuleList",
    "xlnet": NO_INTERFACE,
    "jamba": "keeps recurrent state in model.layers.0.mamba",
}
KEEPING_KEYS = {"deepseek_v3": ("latent_attention",)}  # the hook sees keys and values
AGREEING = [name for name in (*tiny_models.ARCHITECTURES, *FROM_THE_ZOO) if name not in REFUSED_BY_THE_HOOK]


def build(name: str) -> PreTrainedModel:
    """Untied where tests.test_architectures and tests.zoo are, and so on the graphs that they have traced."""
    if name in tiny_models.ARCHITECTURES:
        model = tiny_models.build(name, tie_word_embeddings=False)
    else:
        model = seeded(model_class(name), config_for(name), 0)
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # SDPA, the default of some versions of transformers, drops the softcap
    return model


def run(model: PreTrainedModel, layers: Sequence[AttentionSpec], logits: Callable[[Batch], Tensor]) -> list[Tensor]:
    """Of each step of a ragged batch."""
    prompts = probe_prompts(torch.device("cpu"), model.config.get_text_config().vocab_size)
    steps, found = Steps(layers, prompts, torch.float32), []
    for step in steps_of(prompts, causal=True):
        with torch.no_grad(), steps.context(step) as context:
            found.append(logits(context.batch)[: context.batch.num_logits].clone())
    return found


def by_hook(model: PreTrainedModel) -> tuple[tuple[AttentionSpec, ...], list[Tensor], list[list[int]]]:
    """And the tokens of a loop that one writes around it."""
    with patch(model) as patched:
        tokens = served_by_hand(model, patched.layers, PROMPTS, NEW)
        return patched.layers, run(model, patched.layers, lambda b: model(**b.model_inputs()).logits[0, b.logits_rows]), tokens


def by_graph(model: PreTrainedModel) -> tuple[tuple[AttentionSpec, ...], list[Tensor], list[list[int]]]:
    """And the tokens of an engine that runs the graph."""
    with LLM(model, num_pages=64, disable_passes=KEEPING_KEYS.get(model.config.model_type, ())) as llm:
        runner = llm.engine.runner
        tokens = [completion.token_ids for completion in llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))]
        return runner.layers, run(model, runner.layers, lambda b: runner.forward(b.input_ids, b.positions, b.logits_rows)), tokens


def differences(one: AttentionSpec, other: AttentionSpec) -> list[str]:
    close = math.isclose(one.scale, other.scale, rel_tol=SCALE)
    return dataclasses.replace(one, scale=other.scale if close else one.scale).differences(other)


@pytest.mark.parametrize("name", AGREEING)
def test_both_roads_find_and_compute_the_same(name: str) -> None:
    model = build(name)
    expected = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    hook_specs, hook_logits, hook_tokens = by_hook(model)
    graph_specs, graph_logits, graph_tokens = by_graph(model)
    assert hook_tokens == graph_tokens == expected
    assert [(spec.module, differences(spec, other)) for spec, other in zip(hook_specs, graph_specs, strict=True)] == [
        (other.module, []) for other in graph_specs
    ]
    for one, other in zip(hook_logits, graph_logits, strict=True):
        assert worst(row_errors(other, one)) <= ROUNDING


@pytest.mark.parametrize("name", REFUSED_BY_THE_HOOK)
def test_the_hook_says_why_it_refuses(name: str) -> None:
    model = build(name)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedError) as refusal, patch(model):
        pass
    assert REFUSED_BY_THE_HOOK[name] in str(refusal.value)
    assert model.config._attn_implementation == before


def test_the_models_here_have_every_feature_that_a_road_could_lose() -> None:
    specs = {}
    for name in ("gemma2", "gpt_oss", "gemma3n_text", "granite", "deepseek_v3", "gpt_bigcode"):
        with patch(build(name), self_check=False) as patched:
            specs[name] = patched.layers
    assert {spec.softcap is not None for spec in specs["gemma2"]} == {True}
    assert {spec.has_sinks for spec in specs["gpt_oss"]} == {True}
    assert {spec.sliding_window is None for spec in specs["gpt_oss"]} == {True, False}
    assert [spec.kv_layer for spec in specs["gemma3n_text"]] == [0, 1, 0, 1]
    assert specs["granite"][0].scale != specs["granite"][0].qk_head_dim ** -0.5
    assert specs["deepseek_v3"][0].qk_head_dim != specs["deepseek_v3"][0].v_head_dim
    assert specs["gpt_bigcode"][0].num_kv_heads == 1


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_outside_a_context_a_patched_eager_model_keeps_its_softcap_and_sinks(name: str) -> None:
    model, ids = build(name), torch.randint(2, 90, (2, 21))
    with torch.no_grad():
        before = model(ids).logits
        with patch(model):
            assert torch.equal(model(ids).logits, before)
        assert torch.equal(model(ids).logits, before)


def test_keys_that_were_written_to_in_between_are_not_shared() -> None:
    """Gemma 3n's layer 2 gets the keys of layer 0; if something changes them in place, they are keys of their own."""
    model = build("gemma3n_text")
    forward = type(model.model.layers[2].self_attn).forward

    def changed(module, *args, **kwargs):
        for keys, _ in kwargs["shared_kv_states"].values():
            keys.mul_(1.0)
        return forward(module, *args, **kwargs)

    with mock.patch.object(model.model.layers[2].self_attn, "forward", changed.__get__(model.model.layers[2].self_attn)):
        with patch(model, self_check=False) as patched:
            assert [spec.kv_layer for spec in patched.layers] == [0, 1, 2, 3]
