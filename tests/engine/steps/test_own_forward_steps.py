"""Decode steps of models whose recurrent layers run their own forward are recorded whole (on a tape, in place of CUDA graphs)."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from paged_attn import SamplingParams, explain
from paged_attn.attn_ops.errors import CaptureError
from paged_attn.attn_ops.ops.recurrent import RECURRENT_LAYER
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.engine import Engine
from tests.capture.tape import TapeRecorder
from tests.engine.models import assert_idle, run_all
from tests.engine.steps.test_captured_steps import captured_engine, fixed_backend, modes_of
from tests.engine.test_recurrent import OWN_FORWARD, poison_freed_slots
from tests.oracle import greedy, random_prompts
from tests.recurrent_models import recurrent
from tests.zoo.build import build

NEW = 12
PROMPTS = random_prompts((5, 1, 33, 2, 17, 9))
ZOO = ("minimax", "recurrent_gemma", "rwkv", "xlstm")


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    return build(name) if name in ZOO else recurrent(name)


def forget(model: PreTrainedModel) -> None:
    """RecurrentGemma takes a prompt of one token for the next token of whatever it generated last."""
    for module in model.modules():
        for state in {"conv1d_state", "recurrent_states"} & vars(module).keys():
            setattr(module, state, None)


@functools.cache
def expected(name: str) -> list[list[int]]:
    tokens = []
    for prompt in PROMPTS:
        forget(model_of(name))
        tokens.append(greedy(model_of(name), prompt, NEW))
    assert all(len(set(each)) > 2 for each in tokens[1:]), "an oracle that repeats itself shows nothing"
    return tokens


def engine_of(name: str, **settings: Any) -> Engine:
    captured = {"max_batch_tokens": 16, "max_requests": 3, "graph_decode_sizes": 2, "graph_strict": True}
    engine = captured_engine(model_of(name), **{**captured, **OWN_FORWARD, **settings})
    assert engine.state_pool is not None
    engine.state_pool.fill(float("nan"))
    poison_freed_slots(engine)
    return engine


def tokens_of(engine: Engine) -> list[list[int]]:
    """Answers of 12, 11, ... tokens, so that steps of any number of requests run, beside padding."""
    requests = [
        engine.add_request(prompt, SamplingParams(max_new_tokens=NEW - index, ignore_eos=True)) for index, prompt in enumerate(PROMPTS)
    ]
    run_all(engine)
    return [request.output_token_ids for request in requests]


def cut(tokens: list[list[int]]) -> list[list[int]]:
    return [each[: NEW - index] for index, each in enumerate(tokens)]


@pytest.mark.parametrize("name", [*ZOO, "qwen3_next", "mamba"])
def test_tokens_are_the_models_own_in_full_graphs(name: str) -> None:
    """More requests than slots, which change hands, beside padding and states of NaN; and all of it once more, from snapshots."""
    engine = engine_of(name, state_snapshots=16, page_size=1, num_pages=400)
    modes = modes_of(engine)
    for _ in range(2):
        assert tokens_of(engine) == cut(expected(name))
    assert set(modes) == {"full", "piecewise"}
    assert engine.step_runner.graphs is not None
    full = [captured.segments for key, captured in engine.step_runner.graphs.captured.items() if key.mode == "full"]
    assert full and all((segments.num_graphs, segments.num_calls) == (1, 0) for segments in full)
    assert_idle(engine)


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("minimax", "linear_attention"), ("recurrent_gemma", "short_conv, mamba1_scan"),
        ("rwkv", "short_conv, channel_scan, channel_scan, channel_scan"), ("xlstm", "linear_attention, linear_attention, channel_scan"),
    ],
)  # fmt: skip
def test_so_it_is_by_ops_alone_and_beside_own_forwards(name: str, ops: str) -> None:
    engine = engine_of(name, disable_passes=())
    modes = modes_of(engine)
    assert tokens_of(engine) == cut(expected(name))
    assert set(modes) == {"full", "piecewise"} and f"by ops on the slots of its state ({ops})" in explain(engine)
    assert_idle(engine)


@pytest.mark.parametrize("name", ["rwkv", "minimax"])
def test_who_is_preempted_goes_on(name: str) -> None:
    engine = engine_of(name, num_pages=13, page_size=4)
    assert tokens_of(engine) == cut(expected(name))
    assert engine.scheduler.stats.preemptions > 0
    assert_idle(engine)


@pytest.mark.parametrize("name", [*ZOO, "qwen3_next"])
def test_a_request_alone_is_one_row(name: str) -> None:
    settings = {"page_size": 4, "num_pages": 128, "max_requests": 3, "max_batch_tokens": 24, "gemv": True, "graph_strict": True}
    with fixed_backend():
        engine = Engine(model_of(name), config=EngineConfig(**settings, **OWN_FORWARD), recorder=TapeRecorder())
    assert engine.step_runner.graphs is not None and engine.step_runner.graphs.sizes("full") == [1, 2, 3]
    assert tokens_of(engine) == cut(expected(name))


def asking(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """From now on the recurrent layers of the model look at a value in every call, as code does that waits for the device."""
    kind = type(next(module for module in model.modules() if type(module).__name__ == "Qwen3NextGatedDeltaNet"))
    original = kind.forward

    @functools.wraps(original)
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden_states[0, 0, 0].item()
        return original(self, hidden_states, *args, **kwargs)

    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(kind, "forward", forward)


def test_layers_that_ask_for_values_run_between_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = recurrent("qwen3_next", 1)
    tokens = cut([greedy(model, prompt, NEW) for prompt in PROMPTS])
    asking(monkeypatch, model)
    engine = captured_engine(model, max_batch_tokens=16, max_requests=3, graph_strict=True, **OWN_FORWARD)
    modes = modes_of(engine)
    assert tokens_of(engine) == tokens and set(modes) == {"piecewise"}
    text = explain(engine)
    assert "(not whole: recurrent layers run by their own forward between the graphs: model.layers.0.linear_attn: it asks for val" in text
    assert "not in full graphs (it asks for values of a tensor (aten._local_scalar_dense.default))" in text


class Fails(TapeRecorder):
    """As a GPU does on which the layer's own forward does what a recording does not permit."""

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function is RECURRENT_LAYER:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().call(function, args, kwargs)


def test_a_recording_that_fails_inside_a_layer_leaves_pieces() -> None:
    engine = engine_of("rwkv", recorder=Fails(), graph_strict=False)
    modes = modes_of(engine)
    assert tokens_of(engine) == cut(expected("rwkv")) and set(modes) == {"piecewise"}
    text = explain(engine)
    assert "no graph     full 3: OpNotRecorded: paged_attn.recurrent_layer_with_output.default cannot be recorded: operation not" in text


def test_strict_makes_that_an_error() -> None:
    with pytest.raises(CaptureError, match=r"the graph full 3 cannot be captured: .*recurrent_layer_with_output.* not permitted"):
        engine_of("rwkv", recorder=Fails())


def test_a_replaced_buffer_of_such_a_layer_is_seen() -> None:
    engine = engine_of("minimax")
    layer = next(layer.module for layer in engine.runner.recurrent)
    before, layer.slope_rate = layer.slope_rate, torch.nn.Buffer(layer.slope_rate.clone())
    try:
        engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=3))
        with pytest.raises(CaptureError, match=r"self_attn\.slope_rate was replaced"):
            run_all(engine)
    finally:
        layer.slope_rate = before
