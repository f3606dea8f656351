"""A rewritten graph is split at attention and at registered ops, by overload identity, and computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx

from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.capture.split import split_ops
from paged_attn.capture.split.split_graph import SplitGraph, split_graph
from paged_attn.passes.runner import rewrite
from tests.passes.graphs import Traced, graph_of, ragged_error, trace
from tests.tiny_models import VOCAB, build

_mine = torch.library.Library("split_test", "DEF")
_mine.define("double(Tensor x) -> Tensor")
_mine.define("double.both(Tensor x, Tensor y) -> Tensor")
_mine.define("unified_attention_with_output(Tensor x) -> Tensor")  # attention's name in another namespace
for _name, _function in (
    ("double", lambda x: x * 2),
    ("double.both", lambda x, y: (x + y) * 2),
    ("unified_attention_with_output", lambda x: x + 1),
):
    _mine.impl(_name, _function, "CompositeExplicitAutograd")
double = torch.ops.split_test.double.default
namesake = torch.ops.split_test.unified_attention_with_output.default


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registrations of a test end with it."""
    monkeypatch.setattr(split_ops, "_split_ops", set(split_ops.split_ops()))
    yield


def order(split: SplitGraph) -> list[str]:
    return [str(node.target) for node in split.gm.graph.nodes if node.op == "call_module"]


def ops_in(split: SplitGraph, name: str) -> list[object]:
    return [node.target for node in split.gm.get_submodule(name).graph.nodes if node.op in ("call_function", "call_method")]


def test_a_model_is_split_at_each_attention_and_computes_the_same() -> None:
    model = build("deepseek_v3")  # it assembles its keys in place, which must not cross into another piece

    def work(traced: Traced) -> tuple[SplitGraph, fx.GraphModule, float]:
        result = rewrite(traced.gm, traced.args, model)
        assert result.gm is not None
        split = split_graph(result.gm, split_ops.split_ops())
        error = ragged_error(model, replace(result, gm=split.gm), traced.args, (5, 24, 13), VOCAB)
        return split, result.gm, error

    split, whole, error = trace(model, work, vocabulary=VOCAB, use_cache=False).result
    assert error < 2e-4
    assert len(split.breaks) == model.config.num_hidden_layers == 3
    assert len(split.pieces) == len(split.breaks) + 1
    names = order(split)
    assert names[::2] == list(split.pieces) and names[1::2] == list(split.breaks)
    assert all(ops_in(split, name) == [UNIFIED_ATTENTION] for name in split.breaks)
    assert split.ops == ("paged_attn::unified_attention_with_output",) * 3
    assert all(UNIFIED_ATTENTION not in ops_in(split, name) for name in split.pieces)
    whole_count = sum(node.op in ("call_function", "call_method") for node in whole.graph.nodes)
    assert sum(len(ops_in(split, name)) for name in names) == whole_count
    names_of_inputs = [[node.target for node in gm.graph.nodes if node.op == "placeholder"] for gm in (whole, split.gm)]
    assert names_of_inputs[0] == names_of_inputs[1]


def with_ops(x: Tensor) -> Tensor:
    y = torch.relu(x)
    y = namesake(y) * 3
    z = double(y)
    return (z + y) + torch.ops.split_test.double.both(z, y)


def test_an_op_that_is_not_registered_does_not_split() -> None:
    gm, x = graph_of(with_ops, torch.randn(3)), torch.randn(3)
    split = split_graph(gm, split_ops.split_ops())
    assert split.breaks == () and len(split.pieces) == 1
    assert torch.equal(split.gm(x)[0], with_ops(x))


def test_a_namesake_of_attention_does_not_split() -> None:
    gm = graph_of(with_ops, torch.randn(3))
    assert any("unified_attention_with_output" in str(node.target) for node in gm.graph.nodes)
    assert UNIFIED_ATTENTION in split_ops.split_ops() and namesake not in split_ops.split_ops()
    assert split_graph(gm, split_ops.split_ops()).breaks == ()


def test_a_registered_op_splits_and_its_other_overload_does_not(registry: None) -> None:
    split_ops.register_split_op(double)
    gm, x = graph_of(with_ops, torch.randn(3)), torch.randn(3)
    split = split_graph(gm, split_ops.split_ops())
    assert [ops_in(split, name) for name in split.breaks] == [[double]]
    assert len(split.pieces) == 2 and order(split) == [split.pieces[0], split.breaks[0], split.pieces[1]]
    assert split.ops == ("split_test::double",)
    assert torch.ops.split_test.double.both in ops_in(split, split.pieces[1])
    assert torch.equal(split.gm(x)[0], with_ops(x))


def test_split_ops_next_to_each_other_and_at_the_ends() -> None:
    def chain(x: Tensor) -> Tensor:
        return double(double(torch.relu(double(x))))

    gm, x = graph_of(chain, torch.randn(3)), torch.randn(3)
    split = split_graph(gm, frozenset({double}))
    assert len(split.breaks) == 3 and len(split.pieces) == 1
    assert [name in split.breaks for name in order(split)] == [True, False, True, True]
    assert torch.equal(split.gm(x)[0], chain(x))


def test_more_than_ten_pieces_keep_their_order() -> None:
    def chain(x: Tensor) -> Tensor:
        for step in range(12):
            x = double(x + step) - 3
        return x

    gm, x = graph_of(chain, torch.randn(3)), torch.randn(3)
    split = split_graph(gm, frozenset({double}))
    assert (len(split.breaks), len(split.pieces)) == (12, 13)
    assert torch.equal(split.gm(x)[0], chain(x))


@pytest.mark.parametrize("wrong", ["split_test::double", torch.ops.split_test.double, torch.relu, None])
def test_only_overloads_are_registered(wrong: object) -> None:
    before = split_ops.split_ops()
    with pytest.raises(TypeError, match="a split point is an OpOverload such as"):
        split_ops.register_split_op(wrong)  # type: ignore[arg-type]
    assert split_ops.split_ops() == before


def test_a_refused_packet_is_told_its_overloads() -> None:
    with pytest.raises(TypeError, match="pass one of its overloads: default, both"):
        split_ops.register_split_op(torch.ops.split_test.double)


def test_the_set_that_is_handed_out_is_a_copy() -> None:
    assert isinstance(split_ops.split_ops(), frozenset)
