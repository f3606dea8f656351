"""Merged weights: the model keeps its parameters, names and values; memory is not doubled; tokens stay those of the model."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, PreTrainedModel

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.runners.merged_weights import bind_merged
from paged_attn.passes.optimize.linears.merge import Merge
from paged_attn.passes.optimize.linears.mergeable_weights import lie_in_a_row
from tests.engine.models import oracle, random_prompts
from tests.tiny_models import build

GREEDY = SamplingParams(max_new_tokens=8)
PER_LAYER = {"llama": 2, "qwen2": 3, "qwen3": 2, "opt": 2, "mixtral": 1, "gpt2": 0, "cohere2": 2, "deepseek_v3": 2, "llama4_text": 2}


def model_of(name: str = "llama", **overrides: Any) -> PreTrainedModel:
    return build(name, tie_word_embeddings=False, **overrides)


def llm_of(model: nn.Module, **settings: Any) -> LLM:
    return LLM(model, **{"page_size": 4, "num_pages": 80, "max_batch_tokens": 16, "merge_linears": True, **settings})


def generated(llm: LLM) -> list[list[int]]:
    return [c.token_ids for c in llm.generate(random_prompts(2, 3, 30, 8), GREEDY)]


def expected(model: PreTrainedModel) -> list[list[int]]:
    return [oracle(prompt, 8, model) for prompt in random_prompts(2, 3, 30, 8)]


def merges_of(llm: LLM) -> tuple[Merge, ...]:
    return llm.engine.runner.compiled.rewrite.merges


def storage_bytes(model: nn.Module) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


@pytest.fixture(scope="module")
def merged() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A model whose weights an engine has merged, and its state before; not to be changed."""
    model = model_of()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert len(merges_of(llm_of(model))) == 6
    return model, before


def assert_state(model: nn.Module, before: dict[str, Tensor]) -> None:
    state = model.state_dict()
    assert list(state) == list(before)
    for name, tensor in before.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("name", PER_LAYER)
def test_tokens_are_those_of_the_model(name: str) -> None:
    model = model_of(name)
    want = expected(model)
    llm = llm_of(model)
    assert len(merges_of(llm)) == PER_LAYER[name] * model.config.num_hidden_layers
    assert generated(llm) == want
    assert expected(copy.deepcopy(model)) == want, "the model itself computes as before"


def test_qkv_and_gate_up_of_a_llama_become_one_each() -> None:
    model = model_of()
    llm = llm_of(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layer = [names[id(parameter)].split(".")[-2] for parameter in llm.engine.runner.inputs.owned if id(parameter) in names]
    assert "q_proj" not in layer and "gate_proj" not in layer, "their inputs are the merged tensors"
    assert [merge.rows for merge in merges_of(llm)[:2]] == [(32, 16, 16), (48, 48)]
    attention = model.model.layers[1].self_attn
    assert lie_in_a_row([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])


def test_without_the_option_nothing_moves() -> None:
    model = model_of()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    assert merges_of(llm_of(model, merge_linears=False)) == () == merges_of(llm_of(model, merge_linears=None))
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_the_compile_backend_does_not_take_the_option() -> None:
    with pytest.raises(ValueError, match=r"unknown option 'merge_linears'.*Known options: inductor, self_check"):
        CompileOptions.parse({"merge_linears": True})


def test_the_self_check_looks_at_the_merged_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_attn.engine.runners import traced_runner

    def swapped(args: list[Any], merges: tuple[Merge, ...]) -> list[Any]:
        bound = bind_merged(args, merges)
        first = merges[2].inputs[0]
        bound[first] = bound[first].flip(0)
        return bound

    monkeypatch.setattr(traced_runner, "bind_merged", swapped)
    with pytest.raises(UnsupportedError, match=r"what is served computes something else in model\.layers\.1\.self_attn .*disable_passes="):
        llm_of(model_of())


def test_parameters_stay_the_same_objects_with_the_same_values(merged: Any) -> None:
    model, before = merged
    assert_state(model, before)
    assert all(type(p) is nn.Parameter and p.is_leaf and p.requires_grad and p._base is None for p in model.parameters())
    assert all(p.is_contiguous() and p.data_ptr() % 16 == 0 for p in model.parameters())


def test_no_memory_is_held_twice(merged: Any) -> None:
    model, before = merged
    assert storage_bytes(model) == sum(tensor.nbytes for tensor in before.values())


def test_old_memory_is_free_before_the_next_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.randn(4, 8)) for _ in range(6)]
    values = [p.detach().clone() for p in parameters]
    old = [StorageWeakRef(p.untyped_storage()) for p in parameters]
    freed: list[int] = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors: (freed.append(sum(ref.expired() for ref in old)), cat(tensors))[1])
    bound = bind_merged(parameters, [Merge((0, 1), (4, 4)), Merge((2, 3, 5), (4, 4, 4))])
    assert freed == [0, 2] and [ref.expired() for ref in old] == [True] * 4 + [False, True]
    assert torch.equal(bound[0], torch.cat(values[:2])) and torch.equal(bound[2], torch.cat([values[2], values[3], values[5]]))
    assert all(bound[i] is parameters[i] for i in (1, 3, 4, 5))


def test_weights_can_be_loaded_in_place() -> None:
    model, other = model_of(), model_of(seed=1)
    llm = llm_of(model, prefix_cache=False)
    model.load_state_dict(other.state_dict())
    assert_state(model, other.state_dict())
    assert generated(llm) == expected(other), "the graph reads the memory that the parameters have"
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-1)
        other.model.layers[0].mlp.up_proj.weight.mul_(-1)
    assert generated(llm) == expected(copy.deepcopy(other))


@pytest.mark.parametrize("shard", ["5GB", "10KB"])
def test_save_pretrained_keeps_every_name(merged: Any, tmp_path: Path, shard: str) -> None:
    model, before = merged
    model.save_pretrained(tmp_path, max_shard_size=shard)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard == "10KB")
    stored = {name: tensor for path in files for name, tensor in safetensors.torch.load_file(path).items()}
    assert set(stored) == set(before)
    assert sum(path.stat().st_size for path in files) < 1.2 * storage_bytes(model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_state(loaded, before)
    assert len(merges_of(llm_of(loaded))) == 6, "a loaded model's parameters can be merged"


def test_safetensors_save_file_keeps_every_name(merged: Any, tmp_path: Path) -> None:
    model, before = merged
    safetensors.torch.save_file(model.state_dict(), tmp_path / "weights.safetensors")
    assert {n: t.tolist() for n, t in safetensors.torch.load_file(tmp_path / "weights.safetensors").items()} == {
        n: t.tolist() for n, t in before.items()
    }


def test_torch_save_keeps_values_and_size(merged: Any) -> None:
    model, before = merged
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() < 1.3 * storage_bytes(model)
    other = model_of(seed=1)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert_state(other, before)


def test_a_deep_copy_has_memory_of_its_own(merged: Any) -> None:
    model, before = merged
    twin = copy.deepcopy(model)
    assert_state(twin, before)
    attention = twin.model.layers[0].self_attn
    assert not lie_in_a_row([attention.q_proj.weight, attention.k_proj.weight])


def test_training_goes_on() -> None:
    model, twin = model_of(), model_of()
    llm = llm_of(model)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    for each in (model, twin):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        each(ids, labels=ids).loss.backward()
        optimizer.step()
    assert_state(model, twin.state_dict())
    assert not torch.equal(model.lm_head.weight, model_of().lm_head.weight)
    assert generated(llm) == expected(twin)


def test_a_second_engine_finds_the_merged_memory() -> None:
    model = model_of()
    want = expected(model)
    first = llm_of(model)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    second = llm_of(model)
    assert merges_of(second) == merges_of(first)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    spans = [llm.engine.runner.inputs._args[merges_of(first)[0].inputs[0]] for llm in (first, second)]
    assert spans[0].data_ptr() == spans[1].data_ptr() and spans[0].shape == spans[1].shape == (64, 32)
    assert generated(first) == generated(second) == want


def test_an_engine_without_merging_sees_the_moved_parameters() -> None:
    model = model_of()
    plain = llm_of(model, merge_linears=False)
    want = generated(plain)
    assert len(merges_of(llm_of(model))) == 6
    assert generated(plain) == want


@pytest.mark.slow
def test_pieces_that_inductor_compiled_take_merged_weights() -> None:
    model = model_of(num_hidden_layers=1)
    want = expected(model)
    llm = llm_of(model, inductor=True)
    assert llm.engine.runner.compiled.compiled_by == "Inductor pieces" and len(merges_of(llm)) == 2
    assert generated(llm) == want


def test_bfloat16() -> None:
    model = model_of().to(torch.bfloat16)
    llm = llm_of(model)
    assert len(merges_of(llm)) == 6 and all(len(ids) == 8 for ids in generated(llm))


def test_parameters_can_still_be_trained_if_inference_mode_is_on() -> None:
    parameters = [nn.Parameter(torch.randn(4, 8)) for _ in range(2)]
    with torch.inference_mode():
        bind_merged(parameters, [Merge((0, 1), (4, 4))])
    (parameters[0] * parameters[1]).sum().backward()
    assert torch.equal(parameters[0].grad, parameters[1])  # type: ignore[arg-type]


def test_tied_weights_stay_tied() -> None:
    model = model_of()
    model.model.layers[0].self_attn.v_proj.weight = nn.Parameter(model.model.layers[1].self_attn.v_proj.weight.data)  # not one object
    want = expected(model)
    llm = llm_of(model)
    assert [merge.rows for merge in merges_of(llm)] == [(32, 16), (48, 48), (32, 16), (48, 48), (32, 16, 16), (48, 48)]
    assert generated(llm) == want
    first, second = (model.model.layers[i].self_attn.v_proj.weight for i in (0, 1))
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("wrong", [torch.randn(4, 8), nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(8, 4).t()), 3])
def test_other_inputs_than_the_traced_are_refused(wrong: Any) -> None:
    args = [nn.Parameter(torch.randn(4, 8)), wrong]
    with pytest.raises(ValueError, match=r"input 1 of the graph is a \w+ .*but a parameter of 4 rows was merged; pass the traced inputs"):
        bind_merged(args, [Merge((0, 1), (4, 4))])
