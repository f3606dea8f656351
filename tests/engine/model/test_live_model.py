"""A model that changes under a live engine: numbers written in place are followed, everything else is named by the next call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.engine.model.model_state import ModelState
from paged_attn.engine.runners.model_watch import ModelChangedError
from tests.check.test_rare_ids import OfRareIds
from tests.engine.models import OVERLAP, assert_idle
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build
from tests.zoo.build import build as build_type

PROMPTS = random_prompts((1, 5, 17, 33))
GREEDY = SamplingParams(max_new_tokens=8)
SETTINGS: dict[str, Any] = {"page_size": 4, "num_pages": 200, "max_batch_tokens": 16, "overlap": OVERLAP}


def model_of(seed: int = 0) -> PreTrainedModel:
    return build("qwen3", seed=seed, tie_word_embeddings=False)


def tokens(llm: LLM) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]


def own(model: Any) -> list[list[int]]:
    return [greedy(model, prompt, 8) for prompt in PROMPTS]


def write_weights(model: nn.Module, seed: int) -> None:
    """In place, as an optimizer's step or load_state_dict does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


@pytest.mark.parametrize("compiled", [True, False])
def test_numbers_written_in_place_are_used_and_nothing_cached_is(compiled: bool) -> None:
    model = model_of()
    with LLM(model, compile=compiled, **SETTINGS) as llm:
        before = tokens(llm)
        assert before == own(model)
        for seed in (1, 2):
            write_weights(model, seed)
            after = llm.generate(PROMPTS, GREEDY)
            assert [c.token_ids for c in after] == own(model) != before
            assert [c.cached_tokens for c in after] == [0] * 4
        assert llm.generate(PROMPTS, GREEDY)[3].cached_tokens == 32
        assert_idle(llm.engine)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_of_a_fused_optimizer_is_followed(kind: Any) -> None:
    """Its kernel writes the parameters and leaves their versions as they are."""
    model, other = model_of(), model_of(1)
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    with LLM(model, **SETTINGS) as llm, LLM(other, **SETTINGS) as untouched:
        before, kept = tokens(llm), tokens(untouched)
        versions = [parameter._version for parameter in model.parameters()]
        model(input_ids=torch.tensor([PROMPTS[2]]), labels=torch.tensor([PROMPTS[2]])).loss.backward()
        optimizer.step()
        assert llm.engine.watch.may_be_stale() and not untouched.engine.watch.may_be_stale()
        assert tokens(llm) == own(model) != before
        assert tokens(untouched) == kept and untouched.generate(PROMPTS, GREEDY)[3].cached_tokens == 32
        assert kind is torch.optim.SGD or versions == [parameter._version for parameter in model.parameters()], "why this is tested"


def test_one_parameter_of_many_is_enough() -> None:
    model = model_of()
    with LLM(model, **SETTINGS) as llm:
        tokens(llm)
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight.mul_(-1)
        assert not llm.engine.watch.may_be_stale()  # the quick look sees eight tensors; that at the next request sees all
        assert tokens(llm) == own(model)


def test_snapshots_of_states_are_forgotten_too() -> None:
    model = build_type("lfm2")
    with LLM(model, state_snapshots=8, **SETTINGS) as llm:
        assert tokens(llm) == own(model)
        write_weights(model, 1)
        assert tokens(llm) == own(model)
        assert_idle(llm.engine)


@pytest.mark.parametrize("kind", ["qwen3", "lfm2"])
def test_running_requests_go_on_with_the_new_weights(kind: str) -> None:
    model = build_type(kind)
    with LLM(model, **SETTINGS) as llm:
        stream = llm.stream(PROMPTS[2], SamplingParams(max_new_tokens=12, ignore_eos=True))
        seen = [next(stream).token_id for _ in range(4)]
        late = len(llm.engine.requests[next(iter(llm.engine.requests))].tokens) - len(PROMPTS[2])  # with overlap some are chosen already
        write_weights(model, 3)
        rest = [event.token_id for event in stream]
        assert len(seen) + len(rest) == 12
        known = [*PROMPTS[2], *seen, *rest]
        start = len(PROMPTS[2]) + late + int(OVERLAP)  # whose step was launched before the weights were written
        assert known[start:] == greedy(model, known[:start], len(known) - start)
        assert llm.engine.scheduler.stats.preemptions == 1
        assert tokens(llm) == own(model)
        assert_idle(llm.engine)


def test_a_parameter_whose_data_are_others_is_followed() -> None:
    model = model_of()
    with LLM(model, **SETTINGS) as llm:
        before = tokens(llm)
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.data = weight.data * 2
        assert tokens(llm) == own(model) != before


@contextmanager
def set_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = vars(owner).get(name, missing)
    table = next((t for t in (owner._parameters, owner._modules) if name in t), None) if isinstance(owner, nn.Module) else None
    was = getattr(owner, name)
    setattr(owner, name, value)
    yield
    if table is not None or before is not missing:
        setattr(owner, name, was)
    else:
        delattr(owner, name)


@contextmanager
def hook(module: nn.Module) -> Iterator[None]:
    handle = module.register_forward_hook(lambda module, args, output: None)
    yield
    handle.remove()


def test_a_hook_that_no_step_calls_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """What it records would be of the trace's and the self-check's prompts."""
    model = build("llama")
    with hook(LAYER(model)), LLM(model, **SETTINGS):
        assert "model.layers.1 has a forward hook: answers follow what it returns, but it is not called for their tokens" in caplog.text
    caplog.clear()
    with LLM(model, **SETTINGS):
        assert "forward hook" not in caplog.text


def test_steps_without_a_graph_call_hooks_and_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, calls = build("llama"), []
    LAYER(model).register_forward_hook(lambda module, args, output: calls.append(args))
    with LLM(model, compile=False, **SETTINGS) as llm:
        calls.clear()
        llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))
        assert len(calls) == 4 and "forward hook" not in caplog.text


@contextmanager
def global_hook(factor: float) -> Iterator[None]:
    handle = register_module_forward_hook(lambda module, args, output: output * factor if isinstance(module, nn.Linear) else None)
    yield
    handle.remove()


Change = Callable[[Any], Any]
LAYER: Callable[[Any], Any] = lambda model: model.model.layers[1]  # noqa: E731
CHANGES: dict[str, tuple[Change, str]] = {
    "a parameter": (
        lambda m: set_attribute(LAYER(m).mlp.up_proj, "weight", nn.Parameter(LAYER(m).mlp.up_proj.weight * 2)),
        r"the parameter model\.layers\.1\.mlp\.up_proj\.weight was replaced, and the engine goes on with what was there",
    ),
    "a module": (
        lambda m: set_attribute(LAYER(m), "mlp", copy.deepcopy(LAYER(m).mlp)),
        r"the module model\.layers\.1\.mlp was replaced",
    ),
    "a hook": (lambda m: hook(LAYER(m)), r"a hook of model\.layers\.1 came or went"),
    "a number": (
        lambda m: set_attribute(LAYER(m).self_attn, "scaling", 0.9),
        r"model\.layers\.1\.self_attn\.scaling was 0\.353\d* and is 0\.9, and the model gives other logits",
    ),
    "a forward": (
        lambda m: set_attribute(LAYER(m).mlp, "forward", lambda x: x),
        r"model\.layers\.1\.mlp\.forward is new, and the model gives other logits",
    ),
    "a class": (
        lambda m: set_attribute(type(LAYER(m).mlp), "forward", lambda self, x: x),
        r"Qwen3MLP\.forward was replaced, and the model gives other logits",
    ),
    "a hook on all modules": (lambda m: global_hook(1.2), r"a hook on all modules came or went, and the model gives other logits"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_graph_can_not_follow_is_named_until_it_is_changed_back(name: str) -> None:
    change, words = CHANGES[name]
    model = model_of()
    expected = own(model)
    with LLM(model, **SETTINGS) as llm:
        with change(model), pytest.raises(UnsupportedError, match=rf"changed under a live engine: {words}.*make a new LLM"):
            llm.generate(PROMPTS[1], GREEDY)
        assert not llm.engine.requests
        assert tokens(llm) == expected


def test_a_model_that_was_converted_is_named() -> None:
    model = model_of()
    with LLM(model, **SETTINGS) as llm:
        model.bfloat16()
        with pytest.raises(UnsupportedError, match=r"embed_tokens\.weight was float32 \[96, 32\] on cpu and is bfloat16 .* more\)"):
            llm.generate(PROMPTS[1], GREEDY)


def test_changes_that_change_no_number_are_no_changes() -> None:
    model = model_of()
    with LLM(model, **SETTINGS) as llm:
        tokens(llm)
        model.train()
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        LAYER(model).remark = "an attribute that nobody reads"
        model.config.use_cache = False
        model.requires_grad_(False)
        with global_hook(1.0):
            again = llm.generate(PROMPTS, GREEDY)
        assert again[3].cached_tokens == 32
        model(torch.tensor([PROMPTS[1]]), output_hidden_states=True)  # leaves hooks of transformers behind
        assert any(module._forward_hooks for module in model.modules())
        third = llm.generate(PROMPTS, GREEDY)
    model.eval()
    model.config.use_cache = True
    assert [c.token_ids for c in third] == [c.token_ids for c in again] == own(model)


def test_changes_are_compared_without_the_self_check_too() -> None:
    model = model_of()
    with LLM(model, self_check=False, **SETTINGS) as llm:
        LAYER(model).remark = "an attribute that nobody reads"
        assert tokens(llm) == own(model)
        with set_attribute(LAYER(model).self_attn, "scaling", 0.9), pytest.raises(UnsupportedError, match="scaling was"):
            tokens(llm)


def test_an_engine_that_is_never_idle_looks_now_and_then() -> None:
    model = model_of()
    with LLM(model, **SETTINGS) as llm:
        llm.stream(PROMPTS[1], SamplingParams(max_new_tokens=200))  # keeps it busy
        other = llm.stream(PROMPTS[2], SamplingParams(max_new_tokens=200))
        next(other)
        with hook(LAYER(model)):
            another = llm.stream(PROMPTS[0], SamplingParams(max_new_tokens=200))
            with pytest.raises(UnsupportedError, match="a hook of"):
                list(another)


def adapted(name: str = "qwen3") -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(build(name, tie_word_embeddings=False), config)
    model.add_adapter("b", config)
    torch.manual_seed(1)
    for key, parameter in model.named_parameters():
        if "lora" in key:
            parameter.data = parameter.data + torch.randn_like(parameter) * 0.3
    return model.eval()


def own_of(model: Any) -> list[list[int]]:
    new = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        new.append(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0, -8:].tolist())
    return new


def test_adapters_that_a_graph_does_not_have_are_named() -> None:
    model = adapted()
    expected = own_of(model)
    with LLM(model, **SETTINGS) as llm:
        assert tokens(llm) == expected
        model.set_adapter("b")
        with pytest.raises(UnsupportedError, match=r"active_adapter was 'default' and is 'b'.*other logits than the engine's graph"):
            tokens(llm)
        model.set_adapter("default")
        assert tokens(llm) == expected
        with model.disable_adapter(), pytest.raises(UnsupportedError, match="_disable_adapters was False and is True"):
            tokens(llm)
        assert tokens(llm) == expected
        model.merge_adapter()
        with pytest.raises(UnsupportedError, match=r"merged_adapters was \[\] and is \['default'\]"):
            tokens(llm)
        model.unmerge_adapter()
        assert tokens(llm) == expected


def test_adapters_are_followed_where_the_model_itself_is_called() -> None:
    model = adapted()
    with LLM(model, compile=False, **SETTINGS) as llm:
        for change in (lambda: None, lambda: model.set_adapter("b"), model.merge_adapter, model.unmerge_adapter):
            change()
            expected = own_of(model)
            assert tokens(llm) == expected
        with model.disable_adapter():
            assert tokens(llm) == own_of(model)
        assert tokens(llm) == expected


def test_equal_values_in_other_objects_are_no_difference() -> None:
    model = model_of()
    state = ModelState(model)
    LAYER(model).self_attn.scaling = float(str(LAYER(model).self_attn.scaling))
    model.config.layer_types = list(model.config.layer_types)
    assert state.difference() is None
    model.config.layer_types[0] = "sliding_attention"
    found = state.difference()
    assert found is not None and "layer_types was" in found.altered[0] and not found.replaced


class CountsItsCalls(OfRareIds):
    """It writes into a buffer of its own whenever it is called."""

    def __init__(self) -> None:
        super().__init__("plain")
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(idx)


def test_what_a_model_writes_itself_is_no_change_of_it() -> None:
    """A prompt in two chunks was recomputed for ever; what somebody else writes still counts."""
    torch.manual_seed(0)
    model, prompt = CountsItsCalls().eval(), list(range(40))
    with LLM(model, num_pages=64, max_batch_tokens=32) as llm:
        for _ in range(2):
            completion = llm.generate([prompt], SamplingParams(max_new_tokens=6))[0]
            text = list(prompt)
            for _ in range(6):
                text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
            assert completion.token_ids == text[40:] and llm.engine.scheduler.stats.preemptions == 0
            with torch.no_grad():
                model.embed.weight.mul_(2)


def test_weights_that_somebody_writes_during_a_step_are_still_followed() -> None:
    model = model_of()
    state = ModelState(model)
    before = state.versions()
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    state.leave_out_written_since(before)
    found = state.difference()
    assert found is not None and found.written


def test_a_hooked_model_attends_as_it_is_now_or_says_that_it_does_not() -> None:
    model, prompt = build_type("gemma3_text"), random_prompts((20,))[0]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    with LLM(model, compile=False, num_pages=100) as llm:
        layers = model.model.layers  # type: ignore[union-attr]
        attention: Any = layers[1].self_attn
        attention.scaling *= 3
        with pytest.raises(ModelChangedError, match=r"scaling was .* with which model\.layers\.1\.self_attn would attend otherwise"):
            llm.generate([prompt], params)
        attention.scaling /= 3
        torch.manual_seed(1)
        layers[1].self_attn = type(attention)(attention.config, 1).eval()  # type: ignore[union-attr, operator]
        assert llm.generate([prompt], params)[0].token_ids == greedy(model, prompt, 6)
        del layers[2]  # type: ignore[union-attr, operator]
        assert llm.generate([prompt], params)[0].token_ids == greedy(model, prompt, 6)
