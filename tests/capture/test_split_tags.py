"""Ops that are split points by their tag, as packets, or with several outputs."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx

import paged_attn
from paged_attn.capture.split import split_ops
from paged_attn.capture.split.split_graph import SplitGraph, split_graph
from tests.passes.graphs import graph_of

UNSAFE = torch.Tag.cudagraph_unsafe
_mine = torch.library.Library("split_tags", "DEF")
_mine.define("unsafe(Tensor x) -> Tensor", tags=(UNSAFE,))
_mine.define("unsafe.into(Tensor x, Tensor(a!) out) -> ()", tags=(UNSAFE,))
_mine.define("plain(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
_mine.define("mixed(Tensor x) -> Tensor")
_mine.define("mixed.scaled(Tensor x, float scale) -> Tensor", tags=(UNSAFE,))
_mine.define("pair(Tensor x) -> (Tensor, Tensor)", tags=(UNSAFE,))
_mine.define("parts(Tensor x) -> Tensor[]", tags=(UNSAFE,))


def _double_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


for _name, _function in (
    ("unsafe", lambda x: x * 2),
    ("unsafe.into", lambda x, out: _double_into(x, out)),
    ("plain", lambda x: x + 1),
    ("mixed", lambda x: x - 1),
    ("mixed.scaled", lambda x, scale: x * scale),
    ("pair", lambda x: (x + 1, x * 3)),
    ("parts", lambda x: [x + 1, x * 3, x - 2]),
):
    _mine.impl(_name, _function, "CompositeExplicitAutograd")
ops = torch.ops.split_tags


def targets(split: SplitGraph, name: str) -> list[object]:
    return [node.target for node in split.gm.get_submodule(name).graph.nodes if node.op in ("call_function", "call_method")]


def broken(split: SplitGraph) -> list[list[object]]:
    return [targets(split, name) for name in split.breaks]


def test_an_unsafe_op_splits_without_being_registered() -> None:
    def run(x: Tensor) -> Tensor:
        y = ops.plain.default(torch.relu(x))
        z = ops.unsafe.default(y) + y
        out = torch.empty_like(z)
        ops.unsafe.into(z, out.view(-1))
        return out + z

    gm, x = graph_of(run, torch.randn(3)), torch.randn(3)
    split = split_graph(gm, split_ops.split_ops())
    assert broken(split) == [[ops.unsafe.default], [ops.unsafe.into]] and len(split.pieces) == 3
    assert ops.plain.default in targets(split, split.pieces[0])
    assert torch.equal(split.gm(x)[0], run(x))
    assert split_ops.split_ops().isdisjoint({ops.unsafe.default, ops.unsafe.into})


def test_what_is_a_split_op() -> None:
    registered = frozenset({ops.plain.default})
    for target, expected in {
        ops.plain.default: True,  # registered
        ops.unsafe.into: True,  # tagged
        ops.mixed.default: False,
        ops.mixed.scaled: True,
        ops.mixed: True,  # one of the overloads is
        torch.ops.aten.relu.default: False,
        torch.ops.aten.add: False,
        torch.relu: False,
        operator.add: False,
        "relu": False,  # a module or a method
    }.items():
        assert split_ops.is_split_op(target, registered) is expected, target
    assert not split_ops.is_split_op(ops.plain.default, frozenset()) and not split_ops.is_split_op(ops.plain, frozenset())


def test_an_op_of_pytorch_itself_counts_by_its_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    """None has it in torch 2.13."""
    relu = torch.ops.aten.relu.default
    monkeypatch.setattr(relu, "_tags", [*relu.tags, UNSAFE])
    gm, x = graph_of(lambda x: relu(x + 1) * 2, torch.randn(3)), torch.randn(3)
    assert broken(split_graph(gm, frozenset())) == [[relu]]
    assert torch.equal(split_graph(gm, frozenset()).gm(x)[0], (x + 1).relu() * 2)


def test_a_packet_in_a_graph_splits() -> None:
    """`torch.ops.mylib.op(x)`, as users write it, is a packet in a graph of Dynamo."""

    def run(x: Tensor) -> Tensor:
        return ops.mixed(ops.unsafe(x + 1) + 1, 3.0) * 2

    gm, x = graph_of(run, torch.randn(3)), torch.randn(3)
    assert sum(isinstance(node.target, torch._ops.OpOverloadPacket) for node in gm.graph.nodes) == 2
    split = split_graph(gm, frozenset())
    assert broken(split) == [[ops.unsafe], [ops.mixed]] and len(split.pieces) == 3
    assert torch.equal(split.gm(x)[0], run(x))


@pytest.mark.parametrize("op", [ops.pair.default, ops.pair, ops.parts.default])
def test_several_outputs_are_taken_apart_where_the_op_is(op: object) -> None:
    def run(x: Tensor) -> Tensor:
        several = op(x + 1)  # type: ignore[operator]
        y = several[1] * 2
        return (y + several[0])[1] + y

    gm, x = graph_of(run, torch.randn(3)), torch.randn(3)
    split = split_graph(gm, frozenset())
    assert len(split.breaks) == 1 and len(split.pieces) == 2
    assert {target for target in targets(split, split.breaks[0])} == {op, operator.getitem}
    assert given(split, x) == {Tensor}
    assert torch.equal(split.gm(x)[0], run(x))


def test_an_item_of_one_output_stays_behind_what_writes_into_it() -> None:
    def run(x: Tensor) -> Tensor:
        y = ops.unsafe.default(x)
        y.add_(1)
        return y[torch.tensor([2, 0])] + y[1]

    gm, x = graph_of(run, torch.randn(3)), torch.randn(3)
    split = split_graph(gm, frozenset())
    assert broken(split) == [[ops.unsafe.default]]
    assert torch.equal(split.gm(x)[0], run(x))


def given(split: SplitGraph, *args: object) -> set[type]:
    """The types of what submodules are called with."""
    seen: set[type] = set()

    class Watch(fx.Interpreter):
        def call_module(self, target: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            seen.update(map(type, args))
            return super().call_module(target, args, kwargs)  # type: ignore[arg-type]

    Watch(split.gm).run(*args)
    return seen


def test_register_split_op_is_public() -> None:
    assert paged_attn.register_split_op is split_ops.register_split_op and "register_split_op" in paged_attn.__all__
