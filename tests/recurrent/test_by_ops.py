"""Which layers run by ops on slots: those whose ops give the numbers of the layer's own forward, and no others."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from paged_attn.attn_ops.ops import scans
from paged_attn.recurrent.as_ops import by_ops
from paged_attn.recurrent.as_ops.by_ops import scopes_of, with_ops
from paged_attn.recurrent.as_ops.functions import layer_of_ops, replaced_functions
from paged_attn.recurrent.discover import find_recurrent_layers
from paged_attn.recurrent.layer import RecurrentLayer
from tests.recurrent.test_discover import Mixer, Toy, ToyCache
from tests.recurrent_models import RECURRENT, recurrent
from tests.zoo.build import build

OPS = {
    "qwen3_next": ("short_conv", "gated_delta_rule"), "falcon_h1": ("short_conv", "mamba2_scan"), "bamba": ("short_conv", "mamba2_scan"),
    "lfm2": ("short_conv",), "jamba": ("short_conv", "mamba1_scan"), "mamba": ("short_conv", "mamba1_scan"),
    "mamba2": ("short_conv", "mamba2_scan"),
}  # fmt: skip


def layers_of(model: nn.Module) -> tuple[RecurrentLayer, ...]:
    return find_recurrent_layers(model, lambda length: {"input_ids": torch.arange(length)[None] % 7 + 1})


@pytest.mark.parametrize("name", RECURRENT)
def test_every_layer_of_these_models_is_proved(name: str) -> None:
    model = recurrent(name)
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    layers = with_ops(layers_of(model))
    assert layers and all(layer.ops == OPS[name] and layer.takes_chunks for layer in layers)
    assert f"by ops on the slots of its state ({', '.join(OPS[name])})" in layers[0].describe()
    assert dict(vars(module)) == before, "the model's module is as it was"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["kimi_linear", "bailing_hybrid"])
def test_decays_by_channel_are_proved(name: str, dtype: torch.dtype) -> None:
    layers = with_ops(layers_of(build(name).to(dtype)))
    assert layers and all(layer.ops == ("short_conv", "kda") for layer in layers)


SHARES = [("mamba2", 2, 0.95), ("mamba2", 1, 1.03), ("bamba", 2, 0.95), ("qwen3_next", 3, 0.98)]


@pytest.mark.parametrize(("name", "decays", "share"), SHARES)
def test_ops_that_are_off_by_less_than_16_bits_show_do_not_replace_a_forward(
    name: str, decays: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decays or steps in time that are a little wrong, as a wrong spelling of a softplus would give; the float32 twin shows them."""
    run = scans.run_scan

    def other(op: str, *args: Any) -> None:
        given = list(args[4])
        if op != "short_conv":
            given[decays] = given[decays] * share
        run(op, *args[:4], tuple(given), *args[5:])

    model = copy.deepcopy(recurrent(name)).bfloat16()
    assert all(layer.ops for layer in with_ops(layers_of(model)))
    monkeypatch.setattr(scans, "run_scan", other)
    layers = with_ops(layers_of(model))
    assert layers and not any(layer.ops for layer in layers)
    assert "in float32 its ops are off by" in layers[0].why_no_ops


def test_functions_that_compute_something_else_keep_their_layer_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of the delta rule learn half of what they are told to, as if a version of transformers had changed them."""
    model = recurrent("qwen3_next")
    module = sys.modules[type(model).__module__]

    def half(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*args, **{**kwargs, "beta": kwargs["beta"] / 2})

    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        monkeypatch.setattr(module, name, half(getattr(module, name)))
    layer = with_ops(layers_of(model))[0]
    assert not layer.ops and layer.why_no_ops.startswith("its ops are off by ")
    assert f"by its own forward ({layer.why_no_ops})" in layer.describe()


def test_an_activation_that_no_op_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_of(recurrent("qwen3_next"))
    monkeypatch.setattr(layers[0].module, "activation", "gelu")
    (layer, *_) = with_ops(layers[:1])
    assert layer.why_no_ops == "its convolution has the activation gelu; known are none and silu"


class Saturating(Mixer):
    """h_t = tanh(h_{t-1} + x_t)"""

    def forward(self, hidden: torch.Tensor, cache: ToyCache | None = None, **_: Any) -> torch.Tensor:
        state = torch.zeros_like(hidden[:, 0]) if cache is None or not cache.sums else cache.sums[0]
        outputs = [state := (state + token).tanh() for token in hidden.unbind(1)]
        if cache is not None:
            cache.sums[:] = [state]
        return torch.stack(outputs, 1)


def test_a_layer_that_calls_none_of_the_functions_and_is_no_recurrence_says_so() -> None:
    (layer,) = with_ops(layers_of(Toy(Saturating)))
    why = "it calls no function that an op is known for, and its new state is no linear function of the state before"
    assert not layer.ops and layer.describe().startswith(f"by its own forward ({why}): ")


def test_layers_of_one_kind_are_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "paged_attn"):
        layers = with_ops(layers_of(recurrent("mamba2")))
    assert len(layers) == 3
    assert sum("runs by ops on the slots" in record.message for record in caplog.records) == 1


def test_a_layer_that_can_not_run_without_a_cache_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_of(recurrent("lfm2"))
    forward = layers[0].module.forward

    def needs_a_cache(hidden_states: torch.Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
        return forward(hidden_states, past_key_values=past_key_values if past_key_values.layers else None, **kwargs)

    monkeypatch.setattr(layers[0].module, "forward", needs_a_cache)
    (layer, *_) = with_ops(layers[:1])
    assert layer.why_no_ops.startswith("it cannot be called without a cache: AttributeError: 'NoneType' object has no attribute 'layers'")


def test_what_another_thread_runs_meanwhile_is_as_it_was() -> None:
    model = recurrent("lfm2")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    layer = layers_of(model)[0]
    with replaced_functions(scopes_of([layer.module])), layer_of_ops([state.shape for state in layer.spec.states]):
        with ThreadPoolExecutor(1) as other, torch.no_grad():
            found = other.submit(lambda: model(input_ids=ids, use_cache=False).logits.detach()).result()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("noise", "taken"), [(1e-5, True), (1e-6, False)])
def test_rounding_of_the_layers_own_two_forms_may_be_more_than_is_usual(noise: float, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H100 Qwen3-Next's ops were off by 1.6e-5 in float32, of rows that nearly cancel."""
    layers = layers_of(recurrent("qwen3_next"))
    with torch.no_grad():
        assert 1e-5 < by_ops._own_noise(layers[0]) < 1e-4, "as measured, not as below"
    monkeypatch.setattr(by_ops, "apart", lambda *_: 3e-5)
    monkeypatch.setattr(by_ops, "_own_noise", lambda _: noise)
    # The replaced comparison runs no op, so that it is the number of ops that would refuse it.
    monkeypatch.setattr(by_ops, "ops_that_ran", lambda: dict(enumerate(OPS["qwen3_next"])))
    found = with_ops(layers)
    assert all(bool(layer.ops) == taken for layer in found)
    assert taken or "off by 3e-05 of its size, allowed is 1.5e-05" in found[0].why_no_ops
