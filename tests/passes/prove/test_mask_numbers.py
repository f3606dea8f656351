"""Every large number in a mask's graph is scaled, or harmless, or named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from paged_attn.passes.fx.graph_tools import op_name
from paged_attn.passes.fx.mask_literals import hidden_numbers, scaled_numbers


def nodes_of(function: Callable[[Any], Any]) -> list[fx.Node]:
    return list(fx.symbolic_trace(function).graph.nodes)


@pytest.mark.parametrize(
    ("function", "scaled"),
    [
        (lambda x: x < 4096, [4096]),
        (lambda x: x > -4096, [4096]),
        (lambda x: (x // 8192 == 3) & (x - 20 < 21), [21, 8192]),
        (lambda x: torch.floor_divide(x, 8192), [8192]),
        (lambda x: x.tril_().triu_(-4095), [4095]),
        (lambda x: torch.triu(x, diagonal=-4095), [4095]),
        (lambda x: x.float() < 4096.0, [4096]),
        (lambda x: torch.ops.aten.lt.Scalar(x, 4096), [4096]),
        (lambda x: x.clamp(max=300) + 500, [300, 500]),
        (lambda x: torch.where(x > 5, x, 4096), [4096]),
    ],
)
def test_scaled(function: Callable[[Any], Any], scaled: list[int]) -> None:
    nodes = nodes_of(function)
    assert scaled_numbers(nodes) == scaled
    assert hidden_numbers(nodes, {}) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.masked_fill(x > 3, torch.finfo(torch.float16).min),
        lambda x: x.masked_fill_(x > 3, -10000),
        lambda x: torch.where(x > 3, 0.0, torch.finfo(torch.float32).min),
        lambda x: (1.0 - x) * -10000.0,
        lambda x: x + float("inf"),
        lambda x: x.expand(1, 32, -1, -1).view(32, 64).reshape(2048),
        lambda x: x.new_zeros(4096, 4096) + x.new_full((4096,), 3),
        lambda x: x[2:9, None, 3],
        lambda x: x == 1 << 41,
    ],
)
def test_harmless(function: Callable[[Any], Any]) -> None:
    nodes = nodes_of(function)
    assert scaled_numbers(nodes) == [] and hidden_numbers(nodes, {}) == []


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x[..., 4096:], "4096 in getitem"),
        (lambda x: x[..., [0, 4096]], "4096 in getitem"),
        (lambda x: x >> 13, "13 in rshift"),
        (lambda x: x.bitwise_right_shift(13), "13 in bitwise_right_shift"),
        (lambda x: x**12, "12 in pow"),
        (lambda x: x < 4095.5, "4095.5 in lt"),
        (lambda x: x * 0.0001, "0.0001 in mul"),
        (lambda x: torch.diagonal(x, 4096), "4096 in diagonal"),
        (lambda x: x.roll(4096, 1), "4096 in roll"),
        (lambda x: x.float() > -16384.0, ""),
    ],
)
def test_hidden(function: Callable[[Any], Any], words: str) -> None:
    nodes = nodes_of(function)
    assert hidden_numbers(nodes, {}) == ([words] if words else [])


def test_a_comparison_below_the_hiding_value_is_still_scaled() -> None:
    assert scaled_numbers(nodes_of(lambda x: x.float() > -16384.0)) == [16384]


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.tensor(4096), ["4096 in the tensor x"]), (torch.tensor([3, 512, 7]), ["512 in the tensor x"]), (torch.tensor(8), []),
        (torch.tensor(-10000.0), []), (torch.tensor(float("-inf")), []), (torch.arange(1024), []), (torch.tensor(True), []),
    ],
)  # fmt: skip
def test_small_tensors_of_the_model(tensor: Tensor, found: list[str]) -> None:
    nodes = nodes_of(lambda x: x + 1)
    assert hidden_numbers(nodes, {nodes[0]: tensor}) == found


def test_names_of_operations() -> None:
    nodes = nodes_of(lambda x: torch.ops.aten.add.Tensor(x.add_(1), torch.add(x, 1)) + 1)
    assert [op_name(n) for n in nodes] == ["", "add", "add", "add", "add", ""]
