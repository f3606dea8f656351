"""Dead code goes, in-place operations on anything alive stay; fx's own elimination would lose them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paged_attn.passes.find.attention_site import module_path
from paged_attn.passes.fx.graph_tools import of_module, source_name, symbol
from paged_attn.passes.fx.memory import remove_dead_code, writes_in_place, written_values
from tests.passes.graphs import Toy, assert_ragged_equals_alone, called, graph_of, masked

Part = Callable[[Tensor], Tensor]


def assembled(x: Tensor) -> Tensor:
    """As DeepSeek-V3 assembles its keys; zeros instead of empty so that a lost copy shows for sure."""
    k = x.new_zeros(4, 8)
    k[..., :3].copy_(x[..., :3])
    k[..., 3:].copy_(x[..., 3:] * 2)
    return k


def by_item(x: Tensor) -> Tensor:
    k = torch.zeros_like(x)
    k[1:3] = x[1:3]
    return k


def through_views(x: Tensor) -> Tensor:
    k = x.new_zeros(4, 8)
    k.view(2, 2, 8).transpose(0, 1).unsqueeze(0).flatten(3)[0].select(0, 1).add_(1)
    _, b = k.chunk(2, dim=-1)
    b.mul_(3)
    k.T.swapdims(0, 1).unbind(0)[2].fill_(7)
    return k


def by_function(x: Tensor) -> Tensor:
    k = x.new_zeros(4, 8)
    torch.add(x, 1, out=k)
    torch.relu_(k.ravel())
    operator.imul(k, 2)
    return k


def by_overload(x: Tensor) -> Tensor:
    k = torch.ops.aten.new_zeros.default(x, [4, 8])
    torch.ops.aten.copy_.default(torch.ops.aten.slice.Tensor(k, 0, 1, 3), torch.ops.aten.slice.Tensor(x, 0, 1, 3))
    return k


def by_packet(x: Tensor) -> Tensor:
    """An op of somebody's own, without its overload."""
    k = x.new_zeros(4, 8)
    torch.ops.paged_attn_tests_of_writes.copy_into(x, k[1:])
    return k


LIBRARY = torch.library.Library("paged_attn_tests_of_writes", "DEF")
LIBRARY.define("copy_into(Tensor x, Tensor(a!) rows) -> ()")


@torch.library.impl(LIBRARY, "copy_into", "CompositeExplicitAutograd")
def _copy_into(x: Tensor, rows: Tensor) -> None:
    rows.copy_(x[1:])


def through_dropout(x: Tensor) -> Tensor:
    """Out of training it returns what it was given."""
    k = x * 2
    F.dropout(k, 0.5, training=False).add_(1)
    F.alpha_dropout(k, training=False)[1:].mul_(3)
    return k


def by_flag(x: Tensor) -> Tensor:
    k = x * 2
    F.relu(k, inplace=True)
    F.leaky_relu(k[1:], 0.5, True)
    F.silu(input=k[..., 2:], inplace=True)
    F.hardtanh(k, 0.1, 3.0, True)
    F.elu(k, 2.0)
    return k


def to_the_input(x: Tensor) -> Tensor:
    y = x * 2
    x.add_(1)
    return y


def after_reading(x: Tensor) -> Tensor:
    """The write is behind the reading in order, and before the next."""
    k = x.new_ones(4, 8)
    first = k * x
    k.zero_()
    return first + k


IN_PLACE: list[Part] = [assembled, by_item, through_views, by_function, by_overload, by_packet, after_reading, through_dropout, by_flag]


@pytest.mark.parametrize("part", IN_PLACE)
def test_in_place_operations_are_kept(part: Part) -> None:
    x = torch.randn(4, 8)
    gm = graph_of(part, x.clone())
    remove_dead_code(gm.graph)
    gm.recompile()
    assert torch.equal(gm(x.clone())[0], part(x.clone()))


@pytest.mark.parametrize("part", [assembled, through_views])
def test_plain_elimination_would_lose_them(part: Part) -> None:
    """The negative control of the test above."""
    x = torch.randn(4, 8)
    gm = graph_of(part, x.clone())
    gm.graph.eliminate_dead_code()
    gm.recompile()
    assert not torch.equal(gm(x.clone())[0], part(x.clone()))


def test_a_write_to_an_input_is_an_effect() -> None:
    gm, x = graph_of(to_the_input, torch.ones(4, 8)), torch.ones(4, 8)
    remove_dead_code(gm.graph)
    gm.recompile()
    assert torch.equal(gm(x)[0], torch.full((4, 8), 2.0)) and torch.equal(x, torch.full((4, 8), 2.0))


def dead_mask(x: Tensor) -> Tensor:
    mask = torch.zeros(4, 4)
    mask[:, 1:].masked_fill_(torch.ones(4, 3, dtype=torch.bool), -1.0)
    mask += 1
    operator.and_(x > 0, x > 1)
    return x * 2


def test_what_only_a_dead_value_sees_goes_with_its_writes() -> None:
    gm = graph_of(dead_mask, torch.ones(4, 8))
    remove_dead_code(gm.graph)
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "call_function", "output"]


def test_effects_without_users_stay() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.manual_seed, (3,))
    graph.call_function(torch._assert, (x, "wrong"))
    graph.call_function(torch.relu, (x,))
    graph.output(x)
    remove_dead_code(graph)
    assert [getattr(node.target, "__name__", node.target) for node in graph.nodes] == ["x", "manual_seed", "_assert", "output"]


@pytest.mark.parametrize(
    ("target", "writes"),
    [
        ("add_", True), ("add", False), ("__and__", False), ("index_put_", True), (operator.iadd, True), (operator.setitem, True),
        (operator.and_, False), (operator.or_, False), (operator.not_, False), (torch.relu_, True), (torch.relu, False),
        (torch.ops.aten.copy_.default, True), (torch.ops.aten.add.Tensor, False), (torch.ops.aten.add.out, True),
    ],
)  # fmt: skip
def test_which_nodes_write(target: object, writes: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_method(target, (x, x)) if isinstance(target, str) else graph.call_function(target, (x, x))  # type: ignore[arg-type]
    assert writes_in_place(node) is writes


def test_a_target_named_out_is_written() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    node = graph.call_function(torch.add, (x, x), {"out": y})
    assert writes_in_place(node) and y in written_values(node)


def test_written_values_reach_the_base() -> None:
    gm = graph_of(assembled, torch.ones(4, 8))
    copies = called(gm.graph, "copy_")
    base = called(gm.graph, "new_zeros")[0]
    assert len(copies) == 2
    assert all(base in written_values(node) and node.args[0] in written_values(node) for node in copies)
    assert all(node.args[1] not in written_values(node) for node in copies)


def test_keys_assembled_in_place_survive_the_rewrite() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        keys = k.new_empty(k.shape)
        keys[..., :3].copy_(k[..., :3])
        keys[..., 3:].copy_(k[..., 3:] * 2)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, v, is_causal=True, enable_gqa=True)

    assert_ragged_equals_alone(Toy(attend))


def test_a_mask_made_in_place_leaves_nothing_behind() -> None:
    def mask(ids: Tensor, pos: Tensor) -> Tensor:
        visible = torch.zeros(ids.shape[1], ids.shape[1])
        visible.masked_fill_(torch.ones_like(visible, dtype=torch.bool).triu_(1), float("-inf"))
        return visible

    result = assert_ragged_equals_alone(masked(mask))
    assert result.gm is not None
    assert not any(called(result.gm.graph, name) for name in ("zeros", "ones_like", "masked_fill_", "triu_"))


def test_symbols_of_plain_sizes() -> None:
    assert symbol(7) == 7


def test_a_modules_own_below_a_decorator_of_its_forward() -> None:
    """transformers 5.24 wraps each forward to rename a keyword, so that Dynamo knows the module as `args[0]`."""

    def renaming(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(forward)
        def renamed(*args: Any, **kwargs: Any) -> torch.Tensor:
            return forward(*args, **{"x": kwargs.pop("old", None), **kwargs})

        return renamed

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])
            self.table = torch.ones(4)

        @renaming
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x) + self.table

    found: list[tuple[dict[str, bool], set[str]]] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        owned = {n.target: of_module(source_name(n)) for n in gm.graph.nodes if n.op == "placeholder"}
        found.append((owned, {module_path(n) for n in gm.graph.nodes} - {""}))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Model(), backend=keep, dynamic=True)(old=torch.randn(3, 4))
    ((owned, paths),) = found
    assert paths == {"layers.0"}
    assert sorted(owned.values()) == [False, False, True, True, True]  # the number of rows and x; weight, bias and table
    assert not of_module("L['args'][0].size()[1]") and of_module("L['args'][0].config.scale")
