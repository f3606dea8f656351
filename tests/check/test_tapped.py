"""Running a graph with values seen and replaced, and in wider numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from paged_attn.attn_ops.ops.module import MODULE, register_module
from paged_attn.check.runs.tapped import TappedRun, Taps, WideRun, with_strides_of


def traced(function: Callable[..., Any]) -> fx.GraphModule:
    return fx.symbolic_trace(function)


def as_it_is(_: str, value: Tensor) -> Tensor:
    return value


def test_a_tapped_value_is_replaced_for_all_that_reads_it() -> None:
    def function(x: Tensor) -> Tensor:
        y = x + 1
        return y * 2 + y

    gm = traced(function)
    seen: dict[str, Tensor] = {}

    def visit(name: str, value: Tensor) -> Tensor:
        seen[name] = value
        return torch.full_like(value, 10.0)

    assert TappedRun(gm, Taps({"add"}), visit).run(torch.zeros(2)).tolist() == [30, 30]
    assert list(seen) == ["add"] and seen["add"].tolist() == [1, 1]


def test_of_an_op_that_writes_its_result_that_is_the_value() -> None:
    module = torch.nn.Linear(2, 2, bias=False)
    number = register_module(module, lambda m, given: m(*given))

    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        MODULE([x], out, number)
        return out + 1

    gm = traced(function)
    (name,) = (node.name for node in gm.graph.nodes if node.target is MODULE)
    seen: list[Tensor] = []

    def visit(_: str, value: Tensor) -> Tensor:
        seen.append(value.clone())
        return torch.zeros_like(value)

    x = torch.randn(3, 2)
    with torch.no_grad():
        assert TappedRun(gm, Taps({name}), visit).run(x).tolist() == torch.ones(3, 2).tolist()
        assert torch.equal(seen[0], module(x))


WEIGHT = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def many_roundings(x: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, WEIGHT).to(torch.bfloat16)
    y = torch.softmax(y.float(), -1).to(torch.bfloat16).half().bfloat16() * torch.ones(64, dtype=torch.bfloat16)
    total = torch.zeros(y.shape, dtype=torch.bfloat16)
    total.add_(y)
    return total.type_as(x)


def exact(x: Tensor) -> Tensor:
    return torch.softmax(x.double() @ WEIGHT.double().T, -1)


def test_wide_numbers_take_all_rounding_away() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    gm = traced(many_roundings)
    rounded, wide = gm(x), WideRun(gm, Taps(()), as_it_is, torch.bfloat16).run(x)
    assert rounded.dtype == torch.bfloat16 and wide.dtype == torch.float32
    assert float((rounded.double() - exact(x)).abs().max()) > 1e-4
    assert float((wide.double() - exact(x)).abs().max()) < 1e-6


def test_float32_becomes_float64() -> None:
    gm = traced(lambda x: torch.softmax(x @ WEIGHT.float(), -1, dtype=torch.float32))
    x = torch.randn(5, 64)
    wide = WideRun(gm, Taps(()), as_it_is, torch.float32).run(x)
    assert wide.dtype == torch.float64
    assert float((wide - torch.softmax(x.double() @ WEIGHT.double(), -1)).abs().max()) < 1e-12


@pytest.fixture
def narrow_op() -> Any:
    """Somebody's op that takes bfloat16 alone, as fused kernels do."""
    library = torch.library.Library("narrow_test", "DEF")
    library.define("double(Tensor x) -> Tensor")

    def double(x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16
        return 2 * x

    library.impl("double", double, "CPU")
    yield torch.ops.narrow_test.double.default
    library._destroy()


def test_what_has_no_wide_form_computes_as_it_is_and_is_named(narrow_op: Any) -> None:
    gm = traced(lambda x: narrow_op(x * 3) + 1)
    run = WideRun(gm, Taps(()), as_it_is, torch.bfloat16)
    result = run.run(torch.ones(4, dtype=torch.bfloat16))
    assert result.tolist() == [7] * 4 and result.dtype in (torch.bfloat16, torch.float32)
    assert run.computed_as_it_is == {"narrow_test.double.default"} or "double" in next(iter(run.computed_as_it_is))


def test_an_op_that_writes_a_widened_tensor_writes_what_is_read_afterwards() -> None:
    module = torch.nn.Linear(4, 4, bias=False).bfloat16()
    number = register_module(module, lambda m, given: m(*given))

    def function(x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        MODULE([x * 1], out, number)
        return out + 0

    x = torch.randn(3, 4).bfloat16()
    with torch.no_grad():
        got = WideRun(traced(function), Taps(()), as_it_is, torch.bfloat16).run(x)
        assert got.dtype == torch.float32 and torch.equal(got, module(x).float())


def test_a_changed_value_has_the_strides_of_the_one_that_it_replaces() -> None:
    value = torch.randn(1, 6, 12)[..., 4:8].transpose(1, 2)
    changed = torch.randn(1, 4, 6)
    given = with_strides_of(value, changed)
    assert given.stride() == value.stride() == (72, 1, 12)
    torch.testing.assert_close(given, changed, rtol=0, atol=0)


def test_a_value_that_nobody_changed_goes_on_itself() -> None:
    value = torch.randn(3, 4).T
    assert with_strides_of(value, value) is value


def test_a_value_that_repeats_its_memory_is_replaced_as_it_is() -> None:
    changed = torch.randn(3, 4)
    for value in (torch.randn(1, 4).expand(3, 4), torch.randn(6).unfold(0, 4, 1)):
        assert with_strides_of(value, changed) is changed
