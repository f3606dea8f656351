"""Pieces that compute the same from like inputs have one fingerprint, and no others do."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.ops.linears.linear import LINEAR, LINEAR_FLOAT32
from paged_attn.attn_ops.ops.module import MODULE
from paged_attn.attn_ops.ops.routing import ROUTE
from paged_attn.capture.split.fingerprint import fingerprint, portable

_mine = torch.library.Library("fingerprint_test", "DEF")
_mine.define("double(Tensor x) -> Tensor")
_mine.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")


def users_function(x: Tensor) -> Tensor:
    return x + 1


def piece(target: Any = torch.relu, *extra: Any, names: str = "ab", method: str = "mul", **kwargs: Any) -> fx.GraphModule:
    graph = fx.Graph()
    first, second = (graph.placeholder(name) for name in names)
    value = graph.call_function(target, (first, *extra), kwargs)
    graph.output((graph.call_method(method, (value, second)),))
    return fx.GraphModule({}, graph)


def fakes(
    size: tuple[int, ...] = (6, 4),
    dtype: torch.dtype = torch.float32,
    dynamic: bool = True,
    change: Callable[[Tensor], Tensor] | None = None,
) -> list[Any]:
    """Two fake tensors of a fresh mode, the first with a symbolic first size, and then changed."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = [DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC, *[DimDynamic.STATIC] * (len(size) - 1)]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)  # type: ignore[var-annotated]
    first = mode.from_tensor(torch.empty(size, dtype=dtype), symbolic_context=context)
    with mode:
        return [change(first) if change else first, torch.empty(4)]


def test_names_do_not_matter() -> None:
    assert fingerprint(piece(names="ab"), fakes()) == fingerprint(piece(names="xy"), fakes()) is not None


def test_the_size_that_was_seen_does_not_matter_if_it_is_symbolic() -> None:
    assert fingerprint(piece(), fakes((6, 4))) == fingerprint(piece(), fakes((9, 4)))
    assert fingerprint(piece(), fakes((6, 4), dynamic=False)) != fingerprint(piece(), fakes((9, 4), dynamic=False))


DIFFERENT: dict[str, tuple[fx.GraphModule, list[Any]]] = {
    "function": (piece(torch.tanh), fakes()),
    "method": (piece(method="add"), fakes()),
    "overload": (piece(torch.ops.aten.relu.default), fakes()),
    "order of inputs": (piece(), fakes()[::-1]),
    "dtype": (piece(), fakes(dtype=torch.float64)),
    "size": (piece(), fakes((6, 5))),
    "static": (piece(), fakes(dynamic=False)),
    "stride": (piece(), fakes(change=lambda x: x.t().contiguous().t())),
    "offset": (piece(), fakes(change=lambda x: torch.empty_strided(x.size(), x.stride()).as_strided(x.size(), x.stride(), 1))),
    "expression": (piece(), fakes(change=lambda x: torch.cat([x, x]))),
    "requires grad": (piece(), fakes(change=lambda x: x.requires_grad_())),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_matters_makes_another_fingerprint(name: str) -> None:
    other, inputs = DIFFERENT[name]
    assert None is not fingerprint(other, inputs) != fingerprint(piece(), fakes())


def test_numbers_are_part_of_it_and_so_is_their_type() -> None:
    args = [(torch.add, 1), (torch.add, 1.0), (torch.add, True), (torch.add, 2), (torch.add, -0.0), (torch.add, 0.0), (torch.add, None)]
    args += [
        (torch.add, "1"),
        (torch.add, (1,)),
        (torch.add, [1]),
        (torch.add, slice(1)),
        (torch.add, torch.float32),
        (torch.add, {"a": 1}),
    ]
    prints = [fingerprint(piece(*each), fakes()) for each in args] + [fingerprint(piece(torch.add, alpha=1), fakes())]
    assert None not in prints and len(set(prints)) == len(prints)


def test_inputs_that_share_memory_differ_from_those_that_do_not() -> None:
    first, _ = fakes()
    with first.fake_mode:
        together = [first, first.view(first.size())]
        alone = [first, torch.empty_strided(first.size(), first.stride())]
    assert fingerprint(piece(), together) != fingerprint(piece(), alone)


def test_what_an_argument_refers_to_matters() -> None:
    def chain(last: int) -> fx.GraphModule:
        graph = fx.Graph()
        nodes = [graph.placeholder("a"), graph.placeholder("b")]
        nodes += [graph.call_function(torch.relu, (nodes[0],)), graph.call_function(torch.relu, (nodes[1],))]
        graph.output((graph.call_function(torch.neg, (nodes[last],)),))
        return fx.GraphModule({}, graph)

    assert fingerprint(chain(2), fakes()) != fingerprint(chain(3), fakes())


def test_what_can_not_be_described_has_none() -> None:
    def local(x: Tensor) -> Tensor:
        return x

    wrap = torch._higher_order_ops.wrap.wrap
    for target in (local, lambda x: x, wrap):
        assert fingerprint(piece(target), fakes()) is None
    assert fingerprint(piece(torch.add, torch.ones(2)), fakes()) is None
    assert fingerprint(piece(), [torch.ones(2, 2), torch.ones(2)]) is None, "real tensors are none of a trace"


def test_a_function_that_was_defined_anew_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    old = piece(users_function)
    assert fingerprint(old, fakes()) is not None
    monkeypatch.setitem(globals(), "users_function", lambda x: x)
    assert fingerprint(old, fakes()) is None


def test_sizes_that_come_from_data_have_none() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        rows = torch.empty(mode.shape_env.create_unbacked_symint(), 4)  # type: ignore[union-attr]
        assert fingerprint(piece(), [rows, torch.empty(4)]) is None


def test_only_torch_and_our_ops_are_the_same_in_another_process() -> None:
    for target in (
        torch.relu,
        torch.ops.aten.relu.default,
        torch.ops.aten.relu,
        operator.neg,
        torch.nn.functional.silu,
        torch._C._nn.linear,
        LINEAR,
        LINEAR_FLOAT32,
        EXPERTS,
        ROUTE,
        torch.ops._c10d_functional.all_reduce.default,
    ):
        assert portable(piece(target)), target
    for target in (MODULE, users_function, torch.ops.fingerprint_test.double.default, torch.ops.fingerprint_test.double, lambda x: x):
        assert not portable(piece(target)), target


def test_a_piece_that_holds_something_itself_has_none() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.add, (x, graph.get_attr("table"))))
    assert fingerprint(fx.GraphModule({"table": torch.ones(4)}, graph), fakes()[:1]) is None
