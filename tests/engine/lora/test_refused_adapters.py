"""Adapters that would not be served right are refused by the name of what is in the way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paged_attn import LLM, UnsupportedError
from tests.engine.lora.adapters import Adapters, adapted, base


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(base(), max_loras=2, max_lora_rank=8, num_pages=40) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    return Path(Adapters(path, "llama", {"a": {}}).folders["a"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora is True, which is not served for adapters chosen by request"),
        ({"bias": "all"}, "bias is 'all'; allowed: 'none'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"r": 16}, "has rank 16, and there is room for 8: raise max_lora_rank"),
        ({"targets": ["embed_tokens"]}, "lora_embedding_A"),
    ],
)
def test_settings(llm: LLM, tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    adapted(**settings).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        llm.load_lora("a", tmp_path)
    assert llm.loras == ()


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("init_lora_weights", "pissa", "init_lora_weights is 'pissa', which changes the model's own weights"),
        ("peft_type", "LOHA", "peft_type is 'LOHA'; allowed: 'LORA'"),
        ("of_next_year", {"x": 1}, r"of_next_year is \{'x': 1\}"),
        ("alpha_pattern", {"*q_proj": 8}, r"alpha_pattern has an expression that cannot be read \(nothing to repeat"),
        ("alpha_pattern", ["q"], r"alpha_pattern is \['q'\]; allowed: a number for each expression"),
        ("lora_alpha", "16", "the alpha of .* is '16'; allowed: a number; correct adapter_config.json"),
        ("lora_alpha", None, "the alpha of .* is None; allowed: a number"),
    ],
)
def test_settings_as_files_have_them(llm: LLM, folder: Path, tmp_path: Path, setting: str, value: Any, words: str) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, setting: value}))
    (tmp_path / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=words):
        llm.load_lora("a", tmp_path)


def test_weights_of_another_model(llm: LLM, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    adapted().save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    weights = load_file(file)
    key = next(key for key in weights if "layers.1.self_attn.q_proj.lora_A" in key)
    save_file({**weights, key: torch.zeros(4, 64)}, file)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj has 64 inputs and 32 outputs, that of the model 32 and 32"):
        llm.load_lora("a", tmp_path)
    for number in (float("nan"), float("inf")):
        save_file({**weights, key: torch.full_like(weights[key], number)}, file)
        with pytest.raises(ValueError, match=r"factors of model\.layers\.1\.self_attn\.q_proj are infinite or no numbers"):
            llm.load_lora("a", tmp_path)
    save_file({key.replace("layers.1", "layers.9"): tensor for key, tensor in weights.items()}, file)
    with pytest.raises(UnsupportedError, match=r"changes model\.layers\.9\..*, where the graph of this model has no linear layer.*q_proj"):
        llm.load_lora("a", tmp_path)
    save_file({**weights, "base_model.model.model.embed_tokens.weight": torch.zeros(96, 32)}, file)
    with pytest.raises(UnsupportedError, match=r"brings model\.embed_tokens\.weight \[96, 32\] of its own"):
        llm.load_lora("a", tmp_path)
    save_file({**weights, "base_model.model.model.embed_tokens.weight": llm.engine.runner.model.model.embed_tokens.weight.detach()}, file)
    llm.load_lora("a", tmp_path)  # what the model has anyway
    llm.unload_lora("a")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_weights_that_are_damaged(llm: LLM, tmp_path: Path, name: str) -> None:
    adapted().save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    for content in (b"", b"\x80\x02not weights", b"{" * 400):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{re.escape(name)}.* cannot be read .*copy or save the adapter again"):
            llm.load_lora("a", tmp_path)


def test_no_adapter_there(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no adapter_config\.json in"):
        llm.load_lora("a", tmp_path)
    with pytest.raises(TypeError, match="the adapter 'a' is a int; allowed: the folder"):
        llm.load_lora("a", 3)
    with pytest.raises(ValueError, match="an adapter's name is ''"):
        llm.load_lora("", tmp_path)


def test_where_adapters_can_not_be_chosen(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="compile=False calls the model itself"):
        LLM(base(), loras={"a": folder}, compile=False, num_pages=20)


@pytest.mark.slow
def test_a_graph_that_adds_them_elsewhere_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_attn.passes.optimize.linears import lora

    found = lora._product
    monkeypatch.setattr(
        lora, "_product", lambda node, *more: None if "mlp" in str(node.meta.get("nn_module_stack")) else found(node, *more)
    )
    with LLM(base(), max_loras=1, num_pages=20) as llm:
        assert not any("mlp" in module for module in llm.engine.adapters.modules)  # no place, so nothing can be loaded there
    swapped = lora._parts
    monkeypatch.setattr(lora, "_product", found)
    monkeypatch.setattr(lora, "_parts", lambda room, modules: swapped(room, {**modules, **_swapped(modules)}))
    with pytest.raises(UnsupportedError, match="with random adapters in all linear layers the graph of LlamaForCausalLM gives logits"):
        LLM(base(), max_loras=1, num_pages=20)


def _swapped(modules: dict[int, str]) -> dict[int, str]:
    """The k_proj and v_proj of each layer take each other's place."""
    other = {"k_proj": "v_proj", "v_proj": "k_proj"}
    return {index: path.replace(end, other[end]) for index, path in modules.items() if (end := path.rpartition(".")[2]) in other}
