"""Configs are read without Python code while a model is traced, and are themselves again afterwards."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from paged_attn.calling.plain_configs import plain_configs


def gpt2() -> Any:
    config = AutoConfig.for_model("gpt2", n_embd=32, n_head=4, n_layer=1, vocab_size=32)
    return AutoModelForCausalLM.from_config(config).eval()


def test_all_reads_and_writes_are_as_before() -> None:
    model = gpt2()
    config, kind = model.config, type(model.config)
    before = {name: getattr(config, name) for name in (*vars(config), *config.attribute_map)}
    with plain_configs(model):
        assert type(config).__getattribute__ is object.__getattribute__
        assert isinstance(config, kind) and type(config).__name__ == kind.__name__
        assert {name: getattr(config, name) for name in before} == before
        assert config.to_dict() == kind.from_dict(config.to_dict()).to_dict()
        assert copy.deepcopy(config).hidden_size == 32
        config.hidden_size = 48  # another name of n_embd
        assert config.n_embd == 48
        with pytest.raises(AttributeError, match="no_such_setting"):
            config.no_such_setting  # noqa: B018
    assert type(config) is kind and config.hidden_size == 48


def test_classes_are_set_back_after_a_failure() -> None:
    model = gpt2()
    kind = type(model.config)
    with pytest.raises(ZeroDivisionError), plain_configs(model):
        raise ZeroDivisionError
    assert type(model.config) is kind


class Doubled(PretrainedConfig):
    """Remote code that looks names up in its own way."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return 2 * value if name == "width" else value


class Frozen(PretrainedConfig):
    def __setattr__(self, name: str, value: Any) -> None:
        assert "width" not in vars(self), "it is frozen"
        super().__setattr__(name, value)


class Hashed(PretrainedConfig):
    def __hash__(self) -> int:
        return 5


class Registered(PretrainedConfig):
    def __init_subclass__(cls, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)


@pytest.mark.parametrize("kind", [Doubled, Frozen, Hashed, Registered])
def test_configs_with_ways_of_their_own(kind: type[Any]) -> None:
    model = nn.Module()
    model.config = config = kind(use_cache=True)
    vars(config)["width"] = 3
    width, number = config.width, hash(config) if kind is Hashed else None
    with plain_configs(model):
        assert config.width == width and (number is None or hash(config) == number)
    assert type(config) is kind


def test_a_config_of_two_models_is_itself_again_after_both() -> None:
    """Whichever thread ends first."""
    model = gpt2()
    kind = type(model.config)
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(plain_configs(model))
        second.enter_context(plain_configs(ReadsItsConfig(model.config)))
        first.close()
        assert type(model.config).__getattribute__ is object.__getattribute__, "the other one is being traced"
        second.close()
        assert type(model.config) is kind


class ReadsItsConfig(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.hidden_size


def functions_traced(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions that Dynamo goes into."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    names: list[str] = []
    run = InstructionTranslatorBase.run

    def counted(translator: Any) -> Any:
        names.append(translator.f_code.co_name)
        return run(translator)

    with monkeypatch.context() as patch:
        patch.setattr(InstructionTranslatorBase, "run", counted)
        torch._dynamo.reset()
        assert torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [32, 32]
    return names


def test_dynamo_goes_into_no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ReadsItsConfig(gpt2().config)
    assert "__getattribute__" in functions_traced(model, monkeypatch), "or transformers needs this no more"
    with plain_configs(model):
        assert "__getattribute__" not in functions_traced(model, monkeypatch)
