"""A graph as JSON and back is the same graph, or it is refused; and nothing but torch is called by what comes back."""

from __future__ import annotations

import json
import math
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.ops.module import MODULE
from paged_attn.graph_cache.graph_data import graph_data, graph_of
from paged_attn.hashing.stable_hasher import Indescribable

CPU = torch.device("cpu")


def graph(*calls: tuple[Any, Any, Any], buffers: dict[str, Any] | None = None) -> fx.GraphModule:
    """Calls of x, one after the other, each on the last one's result."""
    built, root = fx.Graph(), nn.Module()
    node = built.placeholder("x")
    for name, value in (buffers or {}).items():
        root.register_buffer(name, value)
        node = built.call_function(torch.add, (node, built.get_attr(name)))
    for target, args, kwargs in calls:
        place = node
        args = fx.map_arg(tuple(place if a is ... else a for a in args), lambda n: n)
        node = built.call_method(target, args, kwargs) if isinstance(target, str) else built.call_function(target, args, kwargs)
    built.output((node, [node, None]))
    return fx.GraphModule(root, built)


def back(gm: fx.GraphModule) -> fx.GraphModule:
    return graph_of(json.loads(json.dumps(graph_data(gm))), CPU)


CALLS: list[tuple[Any, Any, Any]] = [
    (torch.rsqrt, (...,), {}), (F.silu, (...,), {}), (operator.add, (..., 2.5), {}), (torch._C._nn.gelu, (...,), {}),
    ("to", (...,), {"dtype": torch.float64, "device": CPU}), ("sum", (...,), {"dim": (0,), "keepdim": True}),
    (torch.ops.aten.add.Tensor, (..., 3), {"alpha": 2}), (torch.ops.aten.add, (..., 3), {}),
    (torch.floor_divide, (..., 1), {}),
    (torch.full_like, (..., -math.inf), {}), (math.sqrt, (4.0,), {}), (torch.mul, (..., 1 + 2j), {}),
    ("flatten", (...,), {"start_dim": -2}),
    (torch.empty_like, (...,), {"memory_format": torch.contiguous_format, "layout": torch.strided}),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_a_call_comes_back(call: tuple[Any, Any, Any]) -> None:
    gm = graph(call)
    again = back(gm)
    for one, other in zip(gm.graph.nodes, again.graph.nodes, strict=True):
        assert (one.op, one.name, one.target) == (other.op, other.name, other.target)
        assert str(one.args) == str(other.args) and str(one.kwargs) == str(other.kwargs)
        assert [type(a) for a in one.args] == [type(a) for a in other.args]
    assert again.code == gm.code


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_a_comparison_comes_back_as_a_function(name: str) -> None:
    """As torch 2.11 traces every causal mask of transformers: with it no graph of a model was kept."""
    gm, value = graph((f"__{name}__", (..., 0.0), {})), torch.tensor([-1.0, 0.0, 1.0])
    again = back(gm)
    assert [node.target for node in again.graph.nodes if node.op == "call_function"] == [getattr(operator, name)]
    assert torch.equal(again(value)[0], gm(value)[0])
    with pytest.raises(Indescribable):
        graph_data(graph(("__reduce_ex__", (..., 2), {})))


def test_slices_and_dots_come_back() -> None:
    built = fx.Graph()
    x = built.placeholder("x")
    built.output(built.call_function(operator.getitem, (x, (..., slice(None, 3, 2), None, [0, 1]))))
    gm = fx.GraphModule(nn.Module(), built)
    value = torch.randn(2, 5)
    assert torch.equal(back(gm)(value), gm(value)) and back(gm).code == gm.code


def test_its_code_is_written_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is run node by node needs none."""
    write, written = fx.Graph.python_code, list[int]()
    monkeypatch.setattr(fx.Graph, "python_code", lambda *args, **more: (written.append(1), write(*args, **more))[1])
    gm = graph((torch.neg, (...,), {}))
    written.clear()
    again, x = back(gm), torch.randn(3)
    assert torch.equal(fx.Interpreter(again).run(x)[0], -x) and not written
    assert torch.equal(again(x)[0], -x) and torch.equal(again(x)[0], -x) and len(written) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_tables_come_back(dtype: torch.dtype) -> None:
    table = (torch.arange(12).view(3, 4) % 2).to(dtype).T
    gm = graph(buffers={"bias_0": table, "scalar": torch.tensor(1).to(dtype)})
    again = back(gm)
    assert torch.equal(again.bias_0, table) and again.bias_0.dtype == dtype and again.scalar.shape == ()  # type: ignore[arg-type, union-attr]


def twice(x: Any) -> Any:
    return x * 2


@pytest.mark.parametrize(
    "gm",
    [
        graph((twice, (...,), {})), graph((MODULE, ([...], ..., 3), {})), graph((lambda x: x, (...,), {})),
        graph((torch.add, (..., range(3)), {})), graph(buffers={"big": torch.zeros(5 << 20)}),
        graph(buffers={"sparse": torch.eye(2).to_sparse()}), graph((torch.ops.higher_order.cond, (..., 1, 2, ()), {})),
    ],
    ids=["function", "module op", "lambda", "object", "large", "sparse", "higher order"],
)  # fmt: skip
def test_what_is_no_plain_data_is_refused(gm: fx.GraphModule) -> None:
    with pytest.raises(Indescribable):
        graph_data(gm)


def test_our_attention_is_an_op_like_others() -> None:
    data = graph_data(graph((UNIFIED_ATTENTION, (..., ..., ..., ..., 0, True), {})))
    assert graph_of(data, CPU).graph.find_nodes(op="call_function", target=UNIFIED_ATTENTION)


@pytest.mark.parametrize(
    "target",
    [
        ["function", "os", "system"], ["function", "builtins", "exec"], ["function", "builtins", "__import__"], ["function", "torch", "no"],
        ["op", "nobodys", "op", "default", "x"], ["op", "aten", "add", "Tensor", "another schema"], ["function", "subprocess", "run"],
    ],
)  # fmt: skip
def test_nothing_else_is_called_than_torch(target: list[str]) -> None:
    data = graph_data(graph((torch.rsqrt, (...,), {})))
    data["nodes"][1][2] = target
    with pytest.raises((ValueError, AttributeError)):
        graph_of(data, CPU)
