"""Inductor takes a reduction for one along rows, or of columns, by where rows lie, not by the order in which a row is read."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from paged_attn.capture.inductor.reductions import rows_in_any_order
from tests.capture.gpu_code import kernels_for_gpu

Function = Callable[..., torch.Tensor]


def turned_and_normed(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, head dim]: neighbouring numbers are rotated, then each head is normed, as in Llama 4."""
    pairs = x.unflatten(-1, (-1, 2))
    heads = torch.stack([pairs[..., 0] * 0.5 - pairs[..., 1], pairs[..., 1] * 0.5 + pairs[..., 0]], -1).flatten(2)
    return heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-5)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def summed_heads(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


def scaled_and_summed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * scale).sum(-1)


def products_of_columns(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.transpose(1, 2) * y).sum(-1)


def reductions(source: str) -> list[tuple[str, str]]:
    """The kind of each kernel that reduces, and the order that Inductor knows."""
    return re.findall(r"@triton_heuristics\.(persistent_reduction|reduction)\(.*?reduction_hint=ReductionHint\.(\w+)", source, re.DOTALL)


WHOLE, IN_PARTS, COLUMNS = ("persistent_reduction", "INNER"), ("reduction", "INNER"), ("reduction", "OUTER")


@pytest.mark.parametrize(
    ("function", "shapes", "before", "now"),
    [
        (turned_and_normed, [(6, 40, 128)], [COLUMNS], [WHOLE]),
        (normed, [(6, 40, 128)], [WHOLE], [WHOLE]),
        (normed, [(6, 8192)], [IN_PARTS], [IN_PARTS]),
        (scaled_and_summed, [(6, 100, 128), (6, 100, 1)], [WHOLE], [WHOLE]),
        (summed_heads, [(6, 100, 128)], [COLUMNS], [COLUMNS]),
        (products_of_columns, [(6, 100, 128), (6, 128, 100)], [COLUMNS], [COLUMNS]),
    ],
)
def test_rows_are_rows_in_any_order(
    function: Function, shapes: list[tuple[int, ...]], before: list[tuple[str, str]], now: list[tuple[str, str]]
) -> None:
    assert reductions(kernels_for_gpu(function, *shapes)) == before
    with rows_in_any_order():
        assert reductions(kernels_for_gpu(function, *shapes)) == now
