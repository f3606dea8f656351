"""The first factors of all adapters as further rows of the layers' weights: the same tokens, one memory, one product."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.ops.linears.lora import LORA, LORA_UP
from paged_attn.passes.optimize.linears import lora
from tests.engine.lora.adapters import Adapters, base
from tests.oracle import greedy, random_prompts

PROMPTS, WHICH = random_prompts((5, 17, 33, 9)), ["a", None, "b", "a"]
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)
SETTINGS = {"page_size": 4, "num_pages": 200, "max_batch_tokens": 16, "max_loras": 3, "max_lora_rank": 8}


@pytest.fixture(autouse=True)
def room_in_tiny_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "MOST_SPARE", 0)


def two(folder: Path, name: str, targets: Sequence[str] = ("q_proj", "v_proj", "down_proj")) -> Adapters:
    return Adapters(folder, name, {"a": {"targets": targets}, "b": {"r": 7, "targets": targets[1:]}})


def targets_of(llm: LLM) -> list[object]:
    graph = llm.engine.lora_step_runner.runner.graph.split.gm
    modules = [graph, *(module for module in graph.modules() if isinstance(module, torch.fx.GraphModule))]
    return [node.target for module in modules for node in module.graph.nodes if node.target in (LORA, LORA_UP)]


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_tokens(name: str, merged: bool, tmp_path: Path) -> None:
    adapters = two(tmp_path, name, ("q_proj", "v_proj", "o_proj"))
    model = base(name)
    biases = any(path.endswith("q_proj.bias") for path, _ in model.named_parameters())
    assert biases is (name == "qwen2")
    with LLM(model, loras=adapters.folders, merge_linears=merged, **SETTINGS) as llm:
        assert set(targets_of(llm)) == {LORA_UP}
        for _ in range(2):  # the second time from the prefix cache
            completions = llm.generate(PROMPTS, GREEDY, lora=WHICH)
            assert [completion.token_ids for completion in completions] == adapters.expected(PROMPTS, WHICH)
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == adapters.expected(PROMPTS, [None] * 4)


@pytest.mark.slow
def test_weights_lie_in_one_memory_and_are_followed(tmp_path: Path) -> None:
    adapters = two(tmp_path, "llama")
    model = base()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with LLM(model, loras={"a": adapters.folders["a"]}, **SETTINGS) as llm:
        down = model.model.layers[0].mlp.down_proj.weight
        assert down.untyped_storage().nbytes() == (len(down) + 3 * 8) * down.stride(0) * down.itemsize  # one product more, and no copy
        assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
        prompt = PROMPTS[2]
        assert llm.generate([prompt], GREEDY)[0].token_ids == greedy(model, prompt, 8)
        llm.load_lora("b", adapters.folders["b"])  # is not a change of the model: what is cached stays
        cached = llm.engine.stats.cached_tokens
        llm.generate([prompt], GREEDY)
        assert llm.engine.stats.cached_tokens > cached
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight.mul_(-1.5)
            down.add_(0.5)
        assert llm.generate([prompt], GREEDY)[0].token_ids == greedy(model, prompt, 8)
    with LLM(model, loras=adapters.folders, **SETTINGS) as llm:  # they are views now, and stay as they are
        assert LORA in targets_of(llm)
        assert llm.generate([prompt], GREEDY)[0].token_ids == greedy(model, prompt, 8)


@pytest.mark.slow
def test_much_more_to_read_is_left_to_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "MOST_SPARE", 8)
    with LLM(base(), **SETTINGS) as llm:
        assert set(targets_of(llm)) == {LORA}
