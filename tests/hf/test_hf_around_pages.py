"""After `model.compile(backend="paged_attn")`: generates whose calls cannot all be steps of an engine still give transformers' tokens."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Cache, Gemma3Config, Gemma3ForConditionalGeneration

import paged_attn
from paged_attn.hf.cache_name import CACHE_NAME
from paged_attn.hf.compiled_generate import paged_calls
from tests.engine.models import tokenizer
from tests.hf.test_hf_compiled import _small_engines, assert_same_on_pages, calls_of, generate, pair, steps_of
from tests.tiny_models import build

__all__ = ["_small_engines"]
IDS = torch.tensor([[5, 6, 7, 8, 9]])
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
HEADS = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def compiled_twin(model: Any) -> Any:
    twin = copy.deepcopy(model)
    twin.compile(backend="paged_attn")
    generate(twin, {"input_ids": IDS}, max_new_tokens=2)
    return twin


def longrope() -> Any:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    config = AutoConfig.for_model(
        "phi3", **SIZES, **HEADS, max_position_embeddings=256, original_max_position_embeddings=64, initializer_range=0.2,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("length", [60, 80])
def test_a_rotation_that_changes_with_the_length_begins_anew_on_pages(length: int) -> None:
    """transformers drops the cache of a Phi-3 that grows beyond the border, and gives none to a prompt that is longer."""
    plain = longrope()
    models = plain, compiled_twin(plain)
    ids = torch.randint(2, 96, (1, length), generator=torch.Generator().manual_seed(1))
    before = steps_of(models[1])
    assert_same_on_pages(models, {"input_ids": ids}, max_new_tokens=12, do_sample=False)
    assert steps_of(models[1]) >= before + 12


def test_rows_on_both_sides_of_a_border_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    plain = longrope()
    mask = torch.ones(2, 70, dtype=torch.int64)
    mask[0, :50] = 0
    given = {"input_ids": torch.full((2, 70), 7), "attention_mask": mask}
    generate(compiled_twin(plain), given, max_new_tokens=2)
    words = "rows of this batch lie on both sides of 64 tokens"
    assert words in caplog.text
    with pytest.warns(UserWarning, match=words):
        generate(plain, given, max_new_tokens=2, custom_generate=paged_attn.generate_with(num_pages=100))


def test_a_mask_with_a_hole_in_the_middle_goes_on_without_pages(caplog: pytest.LogCaptureFixture) -> None:
    """transformers masks a token that is the padding token where it is given no mask."""
    answers = []
    for model in pair():
        first = generate(model, {"input_ids": IDS}, return_dict_in_generate=True, do_sample=False)
        ids = torch.cat([first.sequences, torch.tensor([[0, 11, 12]])], 1)
        kept = {name: value for name in ("cache", "past_key_values") if (value := getattr(first, name, None)) is not None}
        model.generation_config.pad_token_id = 0
        answers.append(generate(model, {"input_ids": ids}, do_sample=False, **dict([next(iter(kept.items()))])).tolist())
        model.generation_config.pad_token_id = None
    assert answers[0] == answers[1]
    assert "goes on without pages: its attention_mask has zeros elsewhere than on the left" in caplog.text


def test_an_assistant_of_fewer_layers_of_the_same_model_leaves_its_pages(caplog: pytest.LogCaptureFixture) -> None:
    models = pair()
    generate(models[1], {"input_ids": IDS}, do_sample=False)
    engine = calls_of(models[1]).engine
    assert_same_on_pages(models, {"input_ids": IDS}, assistant_early_exit=1, do_sample=False)
    assert calls_of(models[1]).engine is engine and models[1].config.num_hidden_layers == models[0].config.num_hidden_layers
    assert "a generate within another one runs without pages" in caplog.text
    assert_same_on_pages(models, {"input_ids": IDS}, do_sample=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mamba", "mamba2", "falcon_mamba"])
def test_models_of_recurrent_states_alone_run_as_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8} if kind == "mamba2" else {}
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, state_size=8, **more)).eval()
    twin = compiled_twin(plain)
    for _ in range(2):
        assert generate(twin, {"input_ids": IDS}).equal(generate(plain, {"input_ids": IDS}))
    assert "recurrent state" in calls_of(twin).refusal.why
    with torch.no_grad():
        for model in (plain, twin):
            model.lm_head.weight.mul_(-1)
    monkeypatch.setattr(paged_calls, "Engine", None)  # no other is tried, as none could be of use
    assert generate(twin, {"input_ids": IDS}).equal(generate(plain, {"input_ids": IDS}))


@pytest.mark.slow
def test_texts_of_a_model_that_takes_images_too() -> None:
    text = {
        "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, **HEADS, "head_dim": 8, "sliding_window": 8,
        "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    }
    tokens = {"image_token_index": 95, "boi_token_index": 93, "eoi_token_index": 94, "mm_tokens_per_image": 4}
    torch.manual_seed(0)
    plain = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **tokens)).eval()
    plain.generation_config.eos_token_id, plain.generation_config.pad_token_id = None, 0
    assert_same_on_pages((plain, compiled_twin(plain)), {"input_ids": IDS}, do_sample=False)
    theirs, ours = (generate(plain, {"input_ids": IDS}, do_sample=False, **more) for more in ({}, {"custom_generate": paged_attn.generate}))
    assert ours.equal(theirs)


def test_stop_strings_leave_calls_on_pages() -> None:
    assert_same_on_pages(pair(), {"input_ids": IDS}, stop_strings=["zq"], tokenizer=tokenizer(), do_sample=False)


def test_what_was_refused_once_is_served_when_the_model_has_changed() -> None:
    plain = build("llama", tie_word_embeddings=False)
    twin = compiled_twin(plain)

    class ThreeRowsAlone(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) != 3:
                raise ValueError("three rows alone")
            out: torch.Tensor = mlp(x)
            return out

    rows, layer = {"input_ids": IDS.expand(3, 5)}, twin.model.layers[0]
    mlp, layer.mlp = layer.mlp, ThreeRowsAlone()
    before = steps_of(twin)
    assert generate(twin, rows).equal(generate(plain, rows)) and steps_of(twin) == before and "three rows" in calls_of(twin).refusal.why
    layer.mlp = mlp
    assert_same_on_pages((plain, twin), rows)
    assert not calls_of(twin).refusal.why


@pytest.mark.parametrize("where", ["model.layers.0", "", "all modules"])
def test_forward_hooks_are_called_as_often_as_without_us(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """An engine would call them when it traces and checks the model, with prompts of its own, and in no step."""
    seen: dict[bool, list[Any]] = {}
    plain, compiled = pair()
    generate(compiled, {"input_ids": IDS})
    before, engine = steps_of(compiled), calls_of(compiled).engine
    for model in (plain, compiled):
        seen[model is plain] = shapes = []

        def note(module: Any, args: Any, output: Any, shapes: Any = shapes) -> None:
            shapes.append([type(module).__name__, *(getattr(output, "logits", output)[0].shape)])

        on_all = torch.nn.modules.module.register_module_forward_hook
        hook = on_all(note) if where == "all modules" else model.get_submodule(where).register_forward_hook(note)
        generate(model, {"input_ids": IDS}, max_new_tokens=3)
        hook.remove()
    assert seen[True] == seen[False] != [] and steps_of(compiled) == before
    assert f"runs without pages: {where or 'LlamaForCausalLM'} has a forward hook" in caplog.text
    assert_same_on_pages((plain, compiled), {"input_ids": IDS})
    assert calls_of(compiled).engine is engine


def test_an_offloaded_cache_stays_one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    own, asked = Cache.update, []

    def update(cache: Any, *args: Any, **given: Any) -> Any:
        with monkeypatch.context() as on_the_host:  # there is no device to offload from
            asked.append(cache.offloading)
            on_the_host.setattr(cache, "offloading", False)
            return own(cache, *args, **given)

    plain, compiled = pair()
    generate(compiled, {"input_ids": IDS})
    expected, before = generate(plain, {"input_ids": IDS}), steps_of(compiled)
    monkeypatch.setattr(Cache, "update", update)
    assert generate(compiled, {"input_ids": IDS}, cache_implementation="offloaded").equal(expected)
    assert asked and all(asked) and steps_of(compiled) == before
    assert "runs without pages: its cache is offloaded" in caplog.text


def test_a_hook_that_custom_generate_does_not_call_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    hook = model.model.layers[1].register_forward_hook(lambda module, args, output: output * 2)
    expected = generate(model, {"input_ids": IDS})
    assert generate(model, {"input_ids": IDS}, custom_generate=paged_attn.generate, do_sample=False).equal(expected)
    hook.remove()
    assert "model.layers.1 has a forward hook" in caplog.text


@pytest.mark.parametrize("look", [copy.copy, pickle.dumps, list, lambda cache: cache.layers[0].keys])
def test_keys_and_values_in_pages_are_not_there_to_be_read(look: Any) -> None:
    """A shallow copy released the pages a second time: while its original went on, others wrote into them."""
    compiled = pair()[1]
    generate(compiled, {"input_ids": IDS})
    cache = generate(compiled, {"input_ids": IDS}, return_dict_in_generate=True)[CACHE_NAME]
    with pytest.raises(paged_attn.UnsupportedError, match=r"in the pages of model.compile.*: copy.deepcopy\(cache\) branches it; to read"):
        look(cache)


def test_prompts_that_peft_has_learned_are_refused_where_they_would_be_dropped() -> None:
    peft = pytest.importorskip("peft")
    virtual = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tuned = peft.get_peft_model(build("llama", tie_word_embeddings=False), virtual).eval()
    given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    with pytest.raises(paged_attn.UnsupportedError, match="prepare_inputs_for_generation of this LlamaForCausalLM was replaced, as peft"):
        generate(tuned, given, custom_generate=paged_attn.generate)
    assert generate(tuned, given, do_sample=False).shape[1] > 5
