"""Linears of one input are merged where nothing stands against it, and the graph computes the same on merged weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.engine.runners.merged_weights import bind_merged
from paged_attn.passes.fx.graph_tools import as_traced, value_of
from paged_attn.passes.optimize.linears.merge import merge_linears
from paged_attn.passes.optimize.linears.mergeable_weights import Memory, lie_in_a_row
from tests.passes.graphs import VOCAB, Traced, called, copied, trace

_mine = torch.library.Library("merge_test", "DEF")
_mine.define("reads(Tensor x) -> Tensor")
_mine.define("writes(Tensor(a!) x) -> ()")
_mine.impl("reads", lambda x: x * 2, "CompositeExplicitAutograd")
_mine.impl("writes", lambda x: None, "CompositeExplicitAutograd")
reads, writes = torch.ops.merge_test.reads.default, torch.ops.merge_test.writes.default


class Special(nn.Parameter):
    """Stands for a quantised weight."""


class Layers(nn.Module):
    """`use(x, layers)` on an embedding x [1, T, 32] and linears a, b, c (no bias), d, e (bias); returns a tensor of sums [1, T]."""

    def __init__(self, use: Callable[[Tensor, Any], list[Tensor]], prepare: Callable[[Any], None] = lambda _: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.embed = nn.Embedding(VOCAB, 32)
        self.a, self.b, self.c = (nn.Linear(32, n, bias=False) for n in (16, 8, 24))
        self.d, self.e = (nn.Linear(32, n) for n in (16, 8))
        prepare(self)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * torch.cos(position_ids[..., None] * 0.1)
        return torch.cat([t.reshape(1, x.shape[1], -1).cumsum(-1) for t in self.use(x, self)], -1)


def merged_names(module: nn.Module, model: nn.Module | None = None) -> list[str]:
    """The merged parameters, `ab` for those of a and b; the graph with merged weights must compute what it did."""
    names = {id(parameter): name.split(".")[0] + (".bias" in name) * "'" for name, parameter in module.named_parameters()}

    def work(traced: Traced) -> list[list[str]]:
        def run(gm: fx.GraphModule, args: Any) -> Tensor:
            return gm.forward(*map(as_traced, args))[0].clone()

        gm, form, values = copied(traced)
        before = run(traced.gm, traced.args)
        merges = merge_linears(gm.graph, form, values, model)
        gm.graph.lint()
        gm.recompile()
        found = ["".join(names[id(traced.args[i])] for i in merge.inputs) for merge in merges]
        bound = bind_merged(traced.args, merges)
        torch.testing.assert_close(run(gm, bound), before, atol=1e-5, rtol=1e-5)
        for placeholder, value in zip(values, bound, strict=True):
            assert form.roles[placeholder] != "owned" or value_of(placeholder).shape == value.shape, "fake inputs fit the real ones"
        return [found]  # in a list, as trace() takes an empty result for none

    return trace(module, work).result[0]  # type: ignore[no-any-return]


def test_linears_of_one_input_become_one() -> None:
    assert merged_names(Layers(lambda x, m: [m.a(x), m.b(x), F.silu(m.c(x))])) == ["abc"]


def test_biases_are_merged_with_their_weights_and_apart_from_linears_without() -> None:
    assert merged_names(Layers(lambda x, m: [m.d(x), m.a(x), m.e(x), m.b(x)])) == ["de", "d'e'", "ab"]


def test_keywords_are_read() -> None:
    def use(x: Tensor, m: Any) -> list[Tensor]:
        return [F.linear(x, weight=m.d.weight, bias=m.d.bias), F.linear(input=x, weight=m.e.weight, bias=m.e.bias), F.linear(x, m.a.weight)]

    assert merged_names(Layers(use)) == ["de", "d'e'"]


def test_linears_of_different_inputs_stay_apart() -> None:
    assert merged_names(Layers(lambda x, m: [m.a(x), m.b(x * 2)])) == []
    assert merged_names(Layers(lambda x, m: [m.a(x), m.b(x * 2), m.c(x)])) == ["ac"]


def adds_in_place(x: Tensor, m: Any) -> list[Tensor]:
    first = m.a(x)
    x.add_(1)
    return [first, m.b(x), m.c(x)]


def adds_through_a_view(x: Tensor, m: Any) -> list[Tensor]:
    first = m.a(x)
    x.view(-1).add_(1)
    return [first, m.b(x), m.c(x)]


def adds_to_the_base(x: Tensor, m: Any) -> list[Tensor]:
    view = x.view(1, -1, 32)
    first = m.a(view)
    x[..., :3] = 1
    return [first, m.b(view), m.c(view)]


def op_writes(x: Tensor, m: Any) -> list[Tensor]:
    first = m.a(x)
    writes(torch.zeros(3))
    return [first, m.b(x), m.c(x)]


@pytest.mark.parametrize("use", [adds_in_place, adds_through_a_view, adds_to_the_base, op_writes])
def test_no_linear_moves_over_a_write(use: Any) -> None:
    assert merged_names(Layers(use)) == ["bc"]


def test_our_attention_counts_as_such_a_write() -> None:
    assert UNIFIED_ATTENTION._schema.is_mutable


def writes_on_the_output(x: Tensor, m: Any) -> list[Tensor]:
    first, second = m.a(x), m.b(x)
    first *= 3
    second[..., 0] = 7
    return [first, second, m.c(x)]


def test_outputs_may_be_written_in_place() -> None:
    assert merged_names(Layers(writes_on_the_output)) == ["abc"]


def as_complex(x: Tensor, m: Any) -> list[Tensor]:
    return [torch.view_as_real(torch.view_as_complex(m.a(x).float().view(1, -1, 8, 2)) * 1j), m.b(x).unflatten(-1, (2, 4)), m.c(x)]


def test_views_that_fit_a_slice_may_follow() -> None:
    assert merged_names(Layers(as_complex)) == ["abc"]


DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "view over rows": lambda t: t.view(-1),
    "view of a view over rows": lambda t: t.unflatten(-1, (2, 8)).unsqueeze(0).view(-1, 8),
    "view after an in-place write": lambda t: t.mul_(2).view(-1),
    "as_strided": lambda t: t.as_strided((t.shape[1], 4), (16, 1)),
    "torch.as_strided of a view": lambda t: torch.as_strided(t.view(-1, 16), (t.shape[1], 4), (16, 1)),
    "an op of others": reads,
    "an op of others, whichever of its overloads": torch.ops.merge_test.reads,
    "an op of others on a view": lambda t: reads(t.transpose(1, 2)),
}


@pytest.mark.parametrize("name", DENSE)
def test_what_needs_dense_memory_is_left_out(name: str) -> None:
    assert merged_names(Layers(lambda x, m: [DENSE[name](m.a(x)), m.b(x), m.c(x)])) == ["bc"]


def test_what_the_graph_returns_is_left_out() -> None:
    class Bare(Layers):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
            x = self.embed(input_ids) * position_ids[..., None]
            return self.a(x), self.b(x), self.c(x).relu(), F.linear(x, self.d.weight).sigmoid()

    assert merged_names(Bare(lambda *_: [])) == ["cd"]


def replaces(name: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    def prepare(module: Any) -> None:
        layer = getattr(module, name)
        value = make(module)
        del layer._parameters["weight"]
        if isinstance(value, nn.Parameter):
            layer.weight = value
        else:
            layer.register_buffer("weight", value)

    return prepare


UNFIT: dict[str, Callable[[Any], Any]] = {
    "special": lambda m: Special(torch.randn(16, 32)),
    "buffer": lambda m: torch.randn(16, 32),
    "not contiguous": lambda m: nn.Parameter(torch.randn(32, 16).t()),
    "part of something": lambda m: nn.Parameter(torch.randn(20, 32)[:16]),
    "shared with other processes": lambda m: nn.Parameter(torch.randn(16, 32).share_memory_()),
    "rows of odd size": lambda m: nn.Parameter(torch.randn(18, 32)),
}


@pytest.mark.parametrize("name", UNFIT)
def test_weights_that_can_not_be_moved_are_left_alone(name: str) -> None:
    assert merged_names(Layers(lambda x, m: [m.a(x), m.b(x), m.c(x)], replaces("a", UNFIT[name]))) == ["bc"]


def test_a_bias_that_can_not_be_moved_keeps_its_weight_too() -> None:
    def prepare(module: Any) -> None:
        module.d.bias = nn.Parameter(torch.randn(20)[:16])

    assert merged_names(Layers(lambda x, m: [m.d(x), m.e(x)], prepare)) == []


def test_memory_that_a_second_parameter_holds_is_left_alone() -> None:
    module = Layers(lambda x, m: [m.a(x), m.b(x), F.linear(x, m.d.weight), m.c(x)])
    module.d.weight = nn.Parameter(module.a.weight.data)
    assert merged_names(module) == ["bc"]


def test_so_it_is_if_only_the_model_knows_the_second() -> None:
    module = Layers(lambda x, m: [m.a(x), m.b(x), m.c(x)])
    module.register_buffer("other", module.a.weight.data)
    assert merged_names(module, module) == ["bc"]


def test_a_weight_that_is_used_twice_is_left_alone() -> None:
    assert merged_names(Layers(lambda x, m: [m.a(x), m.b(x), m.c(x), m.a(x + 1)])) == ["bc"]


def test_dtypes_are_not_mixed() -> None:
    def prepare(module: Any) -> None:
        module.a.bfloat16()
        module.b.bfloat16()

    def use(x: Tensor, m: Any) -> list[Tensor]:
        y = x.bfloat16()
        return [m.a(y).float(), m.b(y).float(), m.c(x)]

    assert merged_names(Layers(use, prepare)) == ["ab"]


def test_what_autocast_computes_in_another_dtype_is_left_alone() -> None:
    def use(x: Tensor, m: Any) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            low = [m.a(x).float(), m.b(x).float()]
        return [*low, m.c(x), F.linear(x, m.d.weight)]

    assert merged_names(Layers(use)) == ["cd"]


def test_merged_memory_is_found_again_in_the_same_order_only() -> None:
    module = Layers(lambda x, m: [m.a(x), m.b(x), m.c(x)])
    assert merged_names(module) == ["abc"]
    assert lie_in_a_row([module.a.weight, module.b.weight, module.c.weight])
    address = module.a.weight.data_ptr()
    assert merged_names(module) == ["abc"]
    module.use = lambda x, m: [m.b(x), m.c(x)]
    assert merged_names(module) == ["bc"]
    module.use = lambda x, m: [m.c(x), m.a(x)]
    assert merged_names(module) == []
    assert module.a.weight.data_ptr() == address


def test_views_know_their_strides() -> None:
    def work(traced: Traced) -> None:
        gm, form, values = copied(traced)
        merge_linears(gm.graph, form, values)
        first, second = called(gm.graph, "narrow")
        (view,) = [user for user in second.users if user.target == "view"]
        assert value_of(first).stride()[1:] == value_of(second).stride()[1:] == (24, 1)
        assert value_of(view).stride()[1:] == (24, 4, 1)

    trace(Layers(lambda x, m: [m.a(x), m.b(x).view(1, -1, 2, 4)]), work)


def test_own_memory_is_asked_of_every_known_tensor() -> None:
    one = torch.randn(4)
    assert Memory([one, one]).is_own(one)
    assert not Memory([one, one.view(2, 2)]).is_own(one)
    assert not Memory([]).is_own(torch.randn(5)[1:])
