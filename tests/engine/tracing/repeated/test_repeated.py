"""A model whose alike layers are traced twice has the graph of a trace of all layers; layers that only look alike are all traced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from paged_attn import LLM, SamplingParams
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.tracing import trace_model as tracing
from paged_attn.engine.tracing.repeated import find
from paged_attn.engine.tracing.repeated.same_code import NotAlike, check_same_code, expression_of
from paged_attn.passes.fx.graph_tools import source_name, value_of
from tests.oracle import greedy, random_prompts
from tests.zoo.build import seeded
from tests.zoo.configs import config_for, model_class

FEWEST = LAYERS = 3


@pytest.fixture(autouse=True)
def few_layers_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "FEWEST", FEWEST)


def of_type(model_type: str, **changes: Any) -> Any:
    return seeded(model_class(model_type), config_for(model_type, num_hidden_layers=LAYERS, **changes), 0)


def told(graph: fx.Graph) -> list[tuple[str, ...]]:
    """Each node in words: what it calls on which earlier nodes, what Dynamo saw, and the modules around it. Sizes are their expressions."""
    names: dict[fx.Node, str] = {}
    found = []
    for node in graph.nodes:
        value = value_of(node)
        if node.op == "placeholder" or isinstance(value, torch.SymInt):
            names[node] = str(value) if isinstance(value, torch.SymInt) else source_name(node)
            continue
        names[node] = f"%{len(found)}"
        modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        given = map_arg((node.args, node.kwargs), lambda each: names[each])
        found.append((node.op, str(node.target), str(given), _seen(value), str(modules)))
    return found


def _seen(value: Any) -> str:
    return str(pytree.tree_map(lambda each: (each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else each, value))


def traced(model: nn.Module, monkeypatch: pytest.MonkeyPatch, once: bool) -> tuple[list[tuple[str, ...]], dict[str, Any]]:
    """The graph as it was traced, and which tensor of the model it is given under which name."""
    with monkeypatch.context() as patch:
        if not once:
            patch.setattr(tracing, "alike_layers", lambda model, call: [])
        compiled, inputs = tracing.trace_model(model, CompileOptions())
    graph = compiled.original.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return told(graph), {source_name(node): value for node, value in zip(placeholders, inputs, strict=True) if isinstance(value, Tensor)}


def assert_the_same(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    (once, given_once), (each, given) = traced(model, monkeypatch, once=True), traced(model, monkeypatch, once=False)
    assert once == each
    assert given_once.keys() == given.keys()
    own = [name for name in given if name.startswith("L['model']")]
    assert own and [given_once[name].data_ptr() for name in own] == [given[name].data_ptr() for name in own]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Why each layer was traced, if it was."""
    caplog.set_level(logging.INFO, logger="paged_attn")
    return lambda: [record.message for record in caplog.records if "every layer is traced" in record.message]


TYPES = ["llama", "gpt2", "qwen3_moe", "deepseek_v3"]


@pytest.mark.parametrize("model_type", TYPES)
def test_the_graph_is_that_of_a_trace_of_all_layers(
    model_type: str, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    model = of_type(model_type)
    before = {name: vars(module).get("forward") for name, module in model.named_modules()}
    assert_the_same(model, monkeypatch)
    assert not said()
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == before


def test_two_layers_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more: Dynamo reads the attributes of these two alone."""
    read: list[str] = []
    noted = tracing.guards_of_trace

    def note() -> list[tuple[str, str]]:
        found = noted()
        read.extend(expression for expression, _ in found)
        return found

    monkeypatch.setattr(tracing, "guards_of_trace", note)
    traced(of_type("llama"), monkeypatch, once=True)
    layers = [f"L['model']._modules['model']._modules['layers']._modules['{number}']._modules['mlp']" for number in range(LAYERS)]
    assert [any(each.startswith(layer) for each in read) for layer in layers] == [True, True, *[False] * (LAYERS - 2)]


def test_tokens_are_the_models_own(said: Callable[[], list[str]]) -> None:
    model, prompts = of_type("qwen3"), random_prompts([3, 17, 33])
    with LLM(model, page_size=4, num_pages=64, max_batch_tokens=16) as llm:
        got = llm.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert [completion.token_ids for completion in got] == [greedy(model, prompt, 8) for prompt in prompts]
    assert not said()


def test_ops_know_each_layer_by_its_own_number(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    """Three layers with states, and one without."""
    model = seeded(model_class("qwen3_next"), config_for("qwen3_next", num_hidden_layers=4), 0)

    def graph() -> list[tuple[str, ...]]:
        with LLM(model, num_pages=16, self_check=False) as llm:
            compiled = llm.engine.runner.compiled
            assert compiled is not None and len(compiled.recurrent or ()) == 3
            return told(compiled.original.graph)

    once = graph()
    assert not said()
    monkeypatch.setattr(tracing, "alike_layers", lambda model, call: [])
    assert once == graph()
    numbers = [given for _, target, given, *_ in once if target.endswith("gated_delta_rule_with_output.default")]
    assert len(set(numbers)) == 3


def changed(change: Callable[[LlamaDecoderLayer, Tensor, Tensor], Tensor], **attributes: Callable[[int], Any]) -> Any:
    """A Llama whose layers do something to what they return, given (layer, hidden states, result), with attributes by number."""

    class Changed(LlamaDecoderLayer):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            return change(self, hidden_states, super().forward(hidden_states, **kwargs))

    model = of_type("llama")
    for number, layer in enumerate(model.model.layers):
        layer.__class__ = Changed
        for name, value in attributes.items():
            setattr(layer, name, value(number))
    return model


def test_what_is_written_in_place_stays_in_its_layer(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    def change(layer: Any, hidden: Tensor, result: Tensor) -> Tensor:
        result[..., :4].mul_(0.5)
        return result.add_(hidden)

    assert_the_same(changed(change), monkeypatch)
    assert not said()


KEPT: list[Tensor] = []


class Pair:
    def __init__(self, scale: float) -> None:
        self.scale = scale


ONLY_ALIKE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "reads its number": (lambda layer, _, result: result * (1 + layer.self_attn.layer_idx), {}, "layer_idx"),
    "has an object of its own": (lambda layer, _, result: result * layer.pair.scale, {"pair": lambda i: Pair(1 + i / 4)}, ".pair"),
    "has a list of its own": (lambda layer, _, result: result * layer.numbers[1], {"numbers": lambda i: [1, 1 + i]}, "numbers"),
    "branches on a list": (lambda layer, _, result: result * 2 if len(layer.some) > 1 else result, {"some": lambda i: [0] * i}, "some"),
}


@pytest.mark.parametrize("case", ONLY_ALIKE)
def test_layers_that_are_otherwise_are_all_traced(case: str, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    change, attributes, words = ONLY_ALIKE[case]
    traced(changed(change, **attributes), monkeypatch, once=True)
    (why,) = said()
    assert words in why


def test_one_that_leaves_something_for_a_later_one(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    def change(layer: Any, hidden: Tensor, result: Tensor) -> Tensor:
        KEPT.append(result * 2)
        return result + KEPT[-2] if len(KEPT) > 1 else result

    KEPT.clear()
    model = changed(change)

    def forget(*_: Any) -> None:
        KEPT.clear()

    model.register_forward_pre_hook(forget)
    assert_the_same(model, monkeypatch)
    (why,) = said()
    assert "is read outside of it" in why or "which it is not given" in why
    KEPT.clear()


def test_what_is_read_through_the_marks_is_read_of_the_layer() -> None:
    """Dynamo may come to a layer through the forward that stands in its place, which is another for each layer."""
    model = of_type("llama")
    model.model.layers[0].some, model.model.layers[1].some = 1, 2
    one, other = "model.layers.0", "model.layers.1"
    mark = f"{expression_of(one)}.forward.__closure__[1].cell_contents"
    with pytest.raises(NotAlike, match=r"differ in \.some"):
        check_same_code(model, [(f"{mark}.__self__.some", "CONSTANT_MATCH")], one, [other])
    check_same_code(model, [(mark, "TYPE_MATCH"), (f"{mark}.__self__.training", "CONSTANT_MATCH")], one, [other])


def test_attributes_that_are_not_there() -> None:
    """torch 2.11 notes those, too, that code asked for in vain."""
    model = of_type("llama")
    one, other, third = (f"model.layers.{index}" for index in range(3))
    model.model.layers[2].some = 1
    guards = [(f"{expression_of(one)}.some", "HASATTR")]
    check_same_code(model, guards, one, [other])
    with pytest.raises(NotAlike, match=r"differ in \.some"):
        check_same_code(model, guards, one, [other, third])
    with pytest.raises(NotAlike, match="leads nowhere"):
        check_same_code(model, [(f"{expression_of(one)}.some.more", "HASATTR")], one, [other])


def test_gpt2_scales_by_the_number_of_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_the_same(of_type("gpt2", scale_attn_by_inverse_layer_idx=True), monkeypatch)


def test_weights_that_layers_share(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    """All of them a norm; and two of them a product, which the first two do not."""
    model = of_type("llama")
    for layer in model.model.layers:
        layer.input_layernorm = model.model.layers[0].input_layernorm
    assert_the_same(model, monkeypatch)
    assert not said()
    model = of_type("llama")
    last = model.model.layers[-1].mlp
    last.up_proj.weight = last.gate_proj.weight
    assert_the_same(model, monkeypatch)


def test_a_window_of_its_own_is_another_kind(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    """Two kinds of layers in turns."""
    model = seeded(model_class("gemma3_text"), config_for("gemma3_text", num_hidden_layers=2 * FEWEST), 0)
    assert_the_same(model, monkeypatch)
    assert not said()
